"""Which rows each split is drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.data.preferences import PreferencePair, first_turn
from rlhf_core.data.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rlhf_core.config import DataConfig
    from rlhf_core.data.reading import ReadSet

SPLITS = ("sft", "preferences", "ppo", "evaluation")
TASK = "task"


@dataclass(frozen=True)
class Pool:
    """Problems of different keys that some splits are drawn from."""

    name: str
    """The configuration's key: `task`, `problems`, `prompts`, `demonstrations`, `preferences` or `evaluation`."""
    rows: Sequence[Problem]
    paths: str = ""
    """Where they came from, for messages."""

    def __str__(self) -> str:
        """Return the key, and where the rows came from."""
        return f"data.{self.name}" + (f" ({self.paths})" if self.paths else "")


def serving(config: DataConfig, sets: Mapping[str, ReadSet[Any]]) -> dict[str, str]:
    """Return which pool each split is drawn from; a split that nothing serves is not among them.

    PPO and evaluation take the first that there is of task, problems, prompts, preferences and demonstrations;
    evaluation takes sources of its own where it has them. Supervised fine-tuning learns demonstrations, else what
    problems' answers or the preferred responses demonstrate; prompts alone demonstrate nothing. Prompts to sample
    pairs for are drawn where no pairs are given and a verifier could rank the samples.
    """
    given = [TASK] * (config.task is not None) + [
        role for role in ("problems", "prompts", "preferences", "demonstrations") if role in sets
    ]
    main = given[0]
    served = {"ppo": main, "evaluation": "evaluation" if "evaluation" in sets else main}
    learnt = [name for name in ("demonstrations", main, "preferences") if name in given and name != "prompts"]
    if learnt:
        served["sft"] = learnt[0]
    ranked = main == TASK or all(getattr(row, "answer", None) is not None for row in sets[main].rows)
    if "preferences" not in sets and ranked:
        served["preferences"] = main
    return served


def file_pool(name: str, read: ReadSet[Any]) -> Pool:
    """Return a set's rows as problems, each prompt once; of pairs, the preferred response is the demonstration."""
    paths = ", ".join(source.path for source in read.sources)
    found: dict[str, Problem] = {}
    for problem in _as_problems(read.rows):
        found.setdefault(problem.key, problem)
    return Pool(name, list(found.values()), paths)


def _as_problems(rows: Iterable[Problem | PreferencePair]) -> Iterable[Problem]:
    for row in rows:
        if isinstance(row, Problem):
            yield row
            continue
        # To say nothing is no demonstration.
        yield Problem(row.prompt, demonstration=first_turn(row.chosen) or None)

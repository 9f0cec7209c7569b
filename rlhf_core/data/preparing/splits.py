"""Which stage gets which rows: no two splits have a prompt in common, and a row added to a file moves no other."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from rlhf_core.counting import counted
from rlhf_core.data.preferences import PreferencePair
from rlhf_core.data.problems import Problem, has_response_to_learn
from rlhf_core.data.transcripts import first_turn
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rlhf_core.config import DataConfig, SplitsConfig
    from rlhf_core.data.problems import Problem
    from rlhf_core.data.reading import ReadSet

SPLITS = ("sft", "preferences", "ppo", "evaluation")
TASK = "task"
# evaluation is filled first: its problems stay the same when another split grows
FILLING_ORDER = ("evaluation", "preferences", "sft", "ppo")
SHOWN_PROMPT = 60


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


def choose_pools(config: DataConfig, sets: Mapping[str, ReadSet[Any]]) -> dict[str, str]:
    """Return, by split, the pool that it is drawn from; a split without one is not among them.

    PPO and evaluation take the first that there is of task, problems, prompts, preferences and demonstrations;
    evaluation takes sources of its own where it has them. Supervised fine-tuning learns demonstrations, else what
    problems' answers or the preferred responses demonstrate; prompts alone demonstrate nothing. Prompts to sample
    pairs for are drawn where no pairs are given and a verifier could rank the samples.
    """
    given = [TASK] * (config.task is not None) + [
        role for role in ("problems", "prompts", "preferences", "demonstrations") if role in sets
    ]
    main = given[0]
    pool_of = {"ppo": main, "evaluation": "evaluation" if "evaluation" in sets else main}
    learnt = [name for name in ("demonstrations", main, "preferences") if name in given and name != "prompts"]
    if learnt:
        pool_of["sft"] = learnt[0]
    ranked = main == TASK or all(getattr(row, "answer", None) is not None for row in sets[main].rows)
    if "preferences" not in sets and ranked:
        pool_of["preferences"] = main
    return pool_of


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
        # an empty response demonstrates nothing
        yield Problem(row.prompt, demonstration=first_turn(row.chosen) or None)


def needed(pool: str, pool_of: Mapping[str, str], sizes: SplitsConfig) -> dict[str, int]:
    """Return how many problems each of a pool's splits takes of it, in the order in which they are filled."""
    wanted = sizes.model_dump()
    return {split: wanted[split] for split in FILLING_ORDER if pool_of.get(split) == pool}


def fill_splits(pools: Mapping[str, Pool], pool_of: Mapping[str, str], sizes: SplitsConfig) -> dict[str, list[Problem]]:
    """Return every split's problems, taken from the pools in their order; a split without a pool is empty.

    Supervised fine-tuning gets fewer than its size where too few rows have something to learn.
    """
    splits: dict[str, list[Problem]] = {name: [] for name in SPLITS}
    for name, pool in pools.items():
        left = list(pool.rows)
        for split, size in needed(name, pool_of, sizes).items():
            splits[split] = [problem for problem in left if split != "sft" or has_response_to_learn(problem)][:size]
            taken = {problem.key for problem in splits[split]}
            left = [problem for problem in left if problem.key not in taken]
    return splits


def in_hash_order(problems: Iterable[Problem], seed: int) -> list[Problem]:
    """Return the problems in the order of a hash of their keys.

    A beginning of this order is a random sample of all sources of a mixture, so that every split has the mixture's
    proportions on average.
    """

    def place(problem: Problem) -> bytes:
        # the word makes this order independent of others by seed and key, such as the one that holds pairs out from the
        # reward model: the rows that no split takes are late in this order, and must not be late in those, too
        return hashlib.sha256(f"splits\0{seed}\0{problem.key}".encode()).digest()

    return sorted(problems, key=place)


def refuse_overlap(pools: Sequence[Pool], uses: Mapping[str, Sequence[str]]) -> None:
    """Refuse sets that were given separately and share a prompt.

    Args:
        pools: with different names.
        uses: the splits that are drawn from each pool, by its name.

    Raises:
        DataError: naming the sets, their splits, the number of prompts that they share, and one of them.
    """
    prompts = {pool.name: {problem.key: problem.prompt for problem in pool.rows} for pool in pools}
    for one, other in combinations(pools, 2):
        shared = [key for key in prompts[one.name] if key in prompts[other.name]]
        if shared:
            raise DataError(
                f"{one} for {_listed(uses[one.name])} and {other} for {_listed(uses[other.name])} share "
                f"{counted(len(shared), 'prompt')}, such as {prompts[one.name][shared[0]][:SHOWN_PROMPT]!r}; what is "
                "trained on must not be evaluated on, nor one prompt serve two stages: leave them out of one of the two"
            )


def _listed(splits: Sequence[str]) -> str:
    return " and ".join(splits)

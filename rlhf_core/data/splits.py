"""Each stage's problems: no stage sees a prompt of another's."""

from __future__ import annotations

import hashlib
from itertools import combinations, islice
from typing import TYPE_CHECKING

from rlhf_core.data.files import read_problems
from rlhf_core.data.tasks import draw_problems
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rlhf_core.config import DataConfig, SplitsConfig
    from rlhf_core.data.problems import Problem

# evaluation is filled first: its problems stay the same when another split grows
FILLING_ORDER = ("evaluation", "preferences", "sft", "ppo")


def load_problems(config: DataConfig, *, seed: int) -> dict[str, list[Problem]]:
    """Return the problems of each split, from the task or the file that the configuration names.

    Args:
        config: the source and the sizes.
        seed: with the source, all that the result depends on.

    Returns:
        Lists under "sft", "preferences", "ppo" and "evaluation" that share no key.

    Raises:
        DataError: if the source is wrong or has too few problems.
    """
    needed = sum(config.splits.model_dump().values())
    if config.task is not None:
        problems = draw_problems(config.task, config.task_parameters, seed=seed, count=needed)
        source = f"task {config.task!r} with parameters {config.task_parameters}"
    else:
        problems = _shuffled(read_problems(str(config.problems)), seed)
        source = str(config.problems)
    if len(problems) < needed:
        raise DataError(
            f"{source} has {len(problems)} different problems, but data.splits need {needed} "
            f"({_sizes(config.splits)}); lower data.splits or give more problems"
        )
    splits = fill_splits(problems, config.splits)
    assert_disjoint(splits)
    return splits


def fill_splits(problems: Iterable[Problem], sizes: SplitsConfig) -> dict[str, list[Problem]]:
    """Return the problems dealt out in order, split after split; there must be enough of them."""
    supply = iter(problems)
    wanted = sizes.model_dump()
    return {name: list(islice(supply, wanted[name])) for name in FILLING_ORDER}


def assert_disjoint(splits: Mapping[str, Sequence[Problem]]) -> None:
    """Check that no problem is in two splits, nor twice in one.

    Raises:
        DataError: naming the splits and the number of problems that they share.
    """
    keys = {name: {problem.key for problem in problems} for name, problems in splits.items()}
    for name, problems in splits.items():
        if len(keys[name]) < len(problems):
            raise DataError(f"split {name!r} holds {len(problems) - len(keys[name])} problems twice")
    for one, other in combinations(keys, 2):
        shared = keys[one] & keys[other]
        if shared:
            raise DataError(
                f"splits {one!r} and {other!r} share {len(shared)} problems (key {min(shared)}); "
                "what is trained on must not be evaluated on"
            )


def _shuffled(problems: Sequence[Problem], seed: int) -> list[Problem]:
    """Return the problems in the order of a hash of their keys: a row added to the file moves no other."""
    return sorted(problems, key=lambda problem: hashlib.sha256(f"{seed}\0{problem.key}".encode()).digest())


def _sizes(sizes: SplitsConfig) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.model_dump().items())

"""Problems from reasoning-gym: any number of them, by task name and seed."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from rlhf_core.data.entries import entry_to_json
from rlhf_core.data.problems import Problem
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

OURS = ("seed", "size")  # parameters that are not the user's to set
DRAWS_PER_PROBLEM = 20  # a task that repeats itself more often than this is taken to be exhausted
# what the library's tasks raise on parameters that their own checks let pass
TASK_ERRORS = (AssertionError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)


def draw_problems(task: str, parameters: Mapping[str, Any], *, seed: int, count: int) -> list[Problem]:
    """Return different problems of a task, in the order in which they are drawn.

    Args:
        task: name in reasoning-gym.
        parameters: of that task.
        seed: the same seed draws the same problems; a smaller count, the first of them.
        count: how many.

    Returns:
        `count` problems with different keys; fewer only if the task has no more.

    Raises:
        DataError: if the task or a parameter is unknown or refused.
    """
    _check_task(task)
    _check_parameters(task, parameters)
    draws = DRAWS_PER_PROBLEM * count
    problems: dict[str, Problem] = {}
    try:
        dataset = reasoning_gym.create_dataset(task, **parameters, seed=_spread(seed), size=draws)
        for index in range(draws):
            item = dataset[index]
            problem = replace(_adapt(task, item), entry=entry_to_json(item))
            problems.setdefault(problem.key, problem)
            if len(problems) == count:
                break
    except TASK_ERRORS as error:
        given = ", ".join(f"{name}={value!r}" for name, value in parameters.items()) or "its defaults"
        reason = f"{error}" or type(error).__name__
        raise DataError(f"task {task!r} refuses data.task_parameters ({given}): {reason}") from error
    return list(problems.values())


def _check_task(task: str) -> None:
    if task in DATASETS:
        return
    near = difflib.get_close_matches(task, DATASETS, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "see the gallery of reasoning-gym for their names"
    raise DataError(f"data.task {task!r} is not one of the {len(DATASETS)} tasks of reasoning-gym; {hint}")


def _check_parameters(task: str, parameters: Mapping[str, Any]) -> None:
    _, config_class = DATASETS[task]
    known = [field.name for field in dataclasses.fields(config_class) if field.name not in OURS]
    for name in parameters:
        if name in OURS:
            raise DataError(
                f"data.task_parameters must not set {name!r}: the seed and data.splits decide what is drawn"
            )
        if name not in known:
            raise DataError(
                f"task {task!r} has no parameter {name!r} (data.task_parameters); it has {', '.join(known)}"
            )


def _spread(seed: int) -> int:
    """Return a seed far from those of its neighbours: the library's item i of seed s is item 0 of seed s + i."""
    digest = hashlib.sha256(f"reasoning-gym\0{seed}".encode()).digest()
    return int.from_bytes(digest[:4], "little") // 2  # some tasks want seed + index below 2**32


def _adapt(task: str, item: Mapping[str, Any]) -> Problem:
    adapter = ADAPTERS.get(task)
    return adapter(item) if adapter else Problem(str(item["question"]), str(item["answer"]))


def _number_sorting(item: Mapping[str, Any]) -> Problem:
    """Return the short form: 21 tokens of prompt where the library's instructions take 200.

    "Sort these numbers in descending order: 50.0, 61.0, 58.0 ..." becomes "Sort descending: 50 61 58".
    """
    metadata = item["metadata"]
    prompt = f"Sort {metadata['direction']}: {_spaced(metadata['original_numbers'])}"
    return Problem(prompt, _spaced(metadata["sorted_numbers"]))


def _spaced(numbers: list[str]) -> str:
    return " ".join(number.removesuffix(".0") for number in numbers)


ADAPTERS: dict[str, Callable[[Mapping[str, Any]], Problem]] = {"number_sorting": _number_sorting}

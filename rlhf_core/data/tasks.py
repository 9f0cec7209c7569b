"""Problems from reasoning-gym: any number of them, by task name and seed."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import reasoning_gym
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.factory import DATASETS

from rlhf_core.data.adapters import ADAPTERS
from rlhf_core.data.entries import DRAWN, entry_to_json
from rlhf_core.data.problems import Problem
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

COMPOSITE = "composite"
OURS = ("seed", "size")  # parameters that are not the user's to set
DRAWS_PER_PROBLEM = 20  # a task that repeats itself more often than this is taken to be exhausted
# what the library's tasks raise on parameters that their own checks let pass
TASK_ERRORS = (AssertionError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
_SHAPE = "a list of {name: <task>, weight: <above 0>, config: {<parameters of that task>}}"


class _Source(NamedTuple):
    """What the library is asked to draw."""

    task: str
    parameters: Mapping[str, Any]
    """As the library takes them."""
    drawn: Mapping[str, Mapping[str, Any]]
    """Parameters of each task that problems may come from."""


def draw_problems(task: str, parameters: Mapping[str, Any], *, seed: int, count: int) -> list[Problem]:
    """Return different problems of a task, in the order in which they are drawn.

    A problem has no answer where the task knows none and leaves every answer to its scorer.

    Args:
        task: name in reasoning-gym; `composite` mixes several.
        parameters: of that task; a composite's are {"datasets": [{"name", "weight", "config"}, ...]}.
        seed: the same seed draws the same problems; a smaller count, the first of them.
        count: how many.

    Returns:
        `count` problems with different keys; fewer only if the task has no more.

    Raises:
        DataError: if the task or a parameter is unknown or refused, or a record cannot be kept.
    """
    _check_task(task, "data.task")
    _check_parameters(task, parameters, "data.task_parameters")
    source = _mixture(parameters) if task == COMPOSITE else _Source(task, parameters, {task: parameters})
    draws = DRAWS_PER_PROBLEM * count
    problems: dict[str, Problem] = {}
    try:
        dataset = reasoning_gym.create_dataset(task, **source.parameters, seed=_spread(seed), size=draws)
        for index in range(draws):
            problem = _problem(dataset[index], source)
            problems.setdefault(problem.key, problem)
            if len(problems) == count:
                break
    except TASK_ERRORS as error:
        given = ", ".join(f"{name}={value!r}" for name, value in parameters.items()) or "its defaults"
        reason = f"{error}" or type(error).__name__
        raise DataError(f"task {task!r} refuses data.task_parameters ({given}): {reason}") from error
    return list(problems.values())


def _problem(item: Mapping[str, Any], source: _Source) -> Problem:
    task = item["metadata"]["source_dataset"] if source.task == COMPOSITE else source.task
    adapter = ADAPTERS.get(task)
    answer = None if item["answer"] is None else str(item["answer"])
    problem = adapter.problem(item) if adapter else Problem(str(item["question"]), answer)
    entry = entry_to_json({**item, DRAWN: {"task": task, "parameters": dict(source.drawn[task])}})
    if entry is None:
        raise DataError(
            f"task {task!r} keeps records that JSON has no way to tell, so that its scorer could not be asked later; "
            "choose another task"
        )
    return replace(problem, entry=entry)


def _mixture(parameters: Mapping[str, Any]) -> _Source:
    """Return a composite's source, whose parts are checked one by one.

    Raises:
        DataError: if there is none, or one is not as it should be.
    """
    where = "data.task_parameters.datasets"
    parts = parameters.get("datasets")
    if not isinstance(parts, list | tuple) or not parts:
        raise DataError(f"task {COMPOSITE!r} needs {where}, {_SHAPE}; it is {parts!r}")
    for number, part in enumerate(parts, start=1):
        _check_part(part, f"{where}, entry {number},")
    names = [part["name"] for part in parts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{where} names {twice!r} more than once; give each task one entry, and one weight")
    configs = {part["name"]: part.get("config", {}) for part in parts}
    specs = [DatasetSpec(part["name"], float(part.get("weight", 1)), dict(configs[part["name"]])) for part in parts]
    return _Source(COMPOSITE, {"datasets": specs}, configs)


def _check_part(part: Any, where: str) -> None:
    known = {"name", "weight", "config"}
    right = isinstance(part, dict) and isinstance(part.get("name"), str) and set(part) <= known
    weight, config = (part.get("weight", 1), part.get("config", {})) if right else (0, {})
    if not right or isinstance(weight, bool) or not isinstance(weight, int | float) or not isinstance(config, dict):
        raise DataError(f"{where} is {part!r}; expected {_SHAPE}")
    if weight <= 0:
        raise DataError(f"{where} has the weight {weight!r}; give {part['name']!r} one above 0, or leave it out")
    if part["name"] == COMPOSITE:
        raise DataError(f"{where} names {COMPOSITE!r} again; list that one's tasks here")
    _check_task(part["name"], where)
    _check_parameters(part["name"], config, f"{where} config")


def _check_task(task: str, where: str) -> None:
    if task in DATASETS:
        return
    near = difflib.get_close_matches(task, DATASETS, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "see the gallery of reasoning-gym for their names"
    raise DataError(f"{where} {task!r} is not one of the {len(DATASETS)} tasks of reasoning-gym; {hint}")


def _check_parameters(task: str, parameters: Mapping[str, Any], where: str) -> None:
    _, config_class = DATASETS[task]
    known = [field.name for field in dataclasses.fields(config_class) if field.name not in OURS]
    for name in parameters:
        if name in OURS:
            raise DataError(f"{where} must not set {name!r}: the seed and data.splits decide what is drawn")
        if name not in known:
            raise DataError(f"task {task!r} has no parameter {name!r} ({where}); it has {', '.join(known)}")


def _spread(seed: int) -> int:
    """Return a seed far from those of its neighbours: the library's item i of seed s is item 0 of seed s + i."""
    digest = hashlib.sha256(f"reasoning-gym\0{seed}".encode()).digest()
    return int.from_bytes(digest[:4], "little") // 2  # some tasks want seed + index below 2**32

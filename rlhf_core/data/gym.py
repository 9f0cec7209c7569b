"""Problems from reasoning-gym: drawn by task and seed, put in few words, and kept as JSON for the task's own scorer.

The library takes two seconds to import, so it is imported only where problems are drawn.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from rlhf_core.data.problems import Problem
from rlhf_core.errors import DataError

COMPOSITE = "composite"
OURS = ("seed", "size")  # parameters that are not the user's to set
DRAWS_PER_PROBLEM = 20  # a task that repeats itself more often than this is taken to be exhausted
# what the library's tasks raise on parameters that their own checks let pass
TASK_ERRORS = (AssertionError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
_SHAPE = "a list of {name: <task>, weight: <above 0>, config: {<parameters of that task>}}"
DRAWN = "drawn"
"""Key of our records for the task that drew them and its parameters, on which some scorers depend."""
_KIND, _ITEMS = "__kind__", "items"
_KINDS: dict[str, type] = {"tuple": tuple, "set": set, "dict": dict}
_ROUNDING = Fraction(1, 10_000)
"""The library's own tolerance."""


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
    import reasoning_gym  # noqa: PLC0415  # two seconds

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


class _Source(NamedTuple):
    """What the library is asked to draw."""

    task: str
    parameters: Mapping[str, Any]
    """As the library takes them."""
    drawn: Mapping[str, Mapping[str, Any]]
    """Parameters of each task that problems may come from."""


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
    from reasoning_gym.composite import DatasetSpec  # noqa: PLC0415  # two seconds

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
    known = _tasks()
    if task in known:
        return
    near = difflib.get_close_matches(task, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "see the gallery of reasoning-gym for their names"
    raise DataError(f"{where} {task!r} is not one of the {len(known)} tasks of reasoning-gym; {hint}")


def _check_parameters(task: str, parameters: Mapping[str, Any], where: str) -> None:
    _, config_class = _tasks()[task]
    known = [field.name for field in dataclasses.fields(config_class) if field.name not in OURS]
    for name in parameters:
        if name in OURS:
            raise DataError(f"{where} must not set {name!r}: the seed and data.splits decide what is drawn")
        if name not in known:
            raise DataError(f"task {task!r} has no parameter {name!r} ({where}); it has {', '.join(known)}")


def _tasks() -> Mapping[str, Any]:
    """Return the library's tasks by name, each with the class of its parameters."""
    from reasoning_gym.factory import DATASETS  # noqa: PLC0415  # two seconds

    tasks: Mapping[str, Any] = DATASETS
    return tasks


def _spread(seed: int) -> int:
    """Return a seed far from those of its neighbours: the library's item i of seed s is item 0 of seed s + i."""
    digest = hashlib.sha256(f"reasoning-gym\0{seed}".encode()).digest()
    return int.from_bytes(digest[:4], "little") // 2  # some tasks want seed + index below 2**32


def entry_to_json(item: Mapping[str, Any]) -> str | None:
    """Return the record; None if JSON cannot hold it.

    Scorers tell a list from a tuple, and the key 1 from "1". A value whose type JSON would lose is written with it.
    """
    try:
        return json.dumps(_plain(item), sort_keys=True)
    except TypeError:
        return None


def entry_from_json(text: str) -> Any:
    """Return the record that `entry_to_json` wrote."""
    return _rich(json.loads(text))


def _plain(value: Any) -> Any:
    match value:
        case dict() if all(isinstance(key, str) for key in value) and _KIND not in value:
            return {key: _plain(each) for key, each in value.items()}
        case dict():
            return {_KIND: "dict", _ITEMS: [[_plain(key), _plain(each)] for key, each in value.items()]}
        case tuple():
            return {_KIND: "tuple", _ITEMS: [_plain(each) for each in value]}
        case set() | frozenset():
            return {_KIND: "set", _ITEMS: sorted((_plain(each) for each in value), key=repr)}
        case list():
            return [_plain(each) for each in value]
        case _:
            return value.item() if hasattr(value, "item") else value


def _rich(value: Any) -> Any:
    match value:
        case {"__kind__": kind, "items": items}:
            return _KINDS[kind](tuple(_rich(each)) if kind == "dict" else _rich(each) for each in items)
        case dict():
            return {key: _rich(each) for key, each in value.items()}
        case list():
            return [_rich(each) for each in value]
        case _:
            return value


class Adapter(NamedTuple):
    """How problems of one task are put, and how answers to them are read, where the library does it otherwise."""

    problem: Callable[[Mapping[str, Any]], Problem]
    """From the library's record."""
    reread: Callable[[str], str] = str.strip
    """Returns an answer in the form that the library's scorer expects."""
    exact: bool = False
    """Only one answer is right, so that comparing with it is as good as the library's scorer."""
    admits: Callable[[str, Mapping[str, Any]], bool] | None = None
    """Whether an answer passes a check that the library's scorer lacks; an error that this raises means no."""


def _as_it_is(item: Mapping[str, Any]) -> Problem:
    return Problem(str(item["question"]), str(item["answer"]))


def _number_sorting(item: Mapping[str, Any]) -> Problem:
    """Return "Sort descending: 50 61 58" for "Sort these numbers in descending order: 50.0, 61.0, 58.0 ..."."""
    metadata = item["metadata"]
    prompt = f"Sort {metadata['direction']}: {_without_zeros(metadata['original_numbers'])}"
    return Problem(prompt, _without_zeros(metadata["sorted_numbers"]))


def _without_zeros(numbers: Sequence[str]) -> str:
    return " ".join(number.removesuffix(".0") for number in numbers)


def _as_list(answer: str) -> str:
    """Return "['1', '3', '5']" for "1 3 5"."""
    return str(answer.replace(",", " ").split())


def _palindrome_generation(item: Mapping[str, Any]) -> Problem:
    """Return "Palindrome: g j v j g r r v", whose answer may be "g j r v v r j g": letters are tokens of their own."""
    return Problem(f"Palindrome: {' '.join(item['metadata']['letters'])}", " ".join(item["answer"]))


def _without_blanks(text: str) -> str:
    return "".join(text.split())


def _countdown(item: Mapping[str, Any]) -> Problem:
    """Return "Make 13: 1 1 12", whose answer may be "1*1+12"."""
    metadata = item["metadata"]
    prompt = f"Make {metadata['target']}: {' '.join(map(str, metadata['numbers']))}"
    return Problem(prompt, _without_blanks(item["answer"]))


def _same_word(answer: str, item: Mapping[str, Any]) -> bool:
    """Return whether the words are equal: the library takes any text for true, and finds every answer right."""
    return answer.casefold() == str(item["answer"]).casefold()


def _same_number(answer: str, item: Mapping[str, Any]) -> bool:
    """Return whether the numbers are equal: the library takes any beginning of the right one, such as 0 for 0.375."""
    return abs(Fraction(answer) - Fraction(str(item["answer"]))) <= _ROUNDING


def _finite(answer: str, item: Mapping[str, Any]) -> bool:
    """Return whether the answer is finite: the library finds no distance between nan and the right number."""
    del item
    return "nan" not in answer.casefold() and "inf" not in answer.casefold()


def _its_numbers(answer: str, item: Mapping[str, Any]) -> bool:
    """Return whether the answer uses the problem's numbers: the library takes any four that make 24."""
    return sorted(map(int, re.findall("[0-9]+", answer))) == sorted(item["metadata"]["numbers"])


ADAPTERS: dict[str, Adapter] = {
    "number_sorting": Adapter(_number_sorting, _as_list, exact=True),
    "palindrome_generation": Adapter(_palindrome_generation, _without_blanks),
    "countdown": Adapter(_countdown),
    "game_of_life_halting": Adapter(_as_it_is, admits=_same_word),
    "coin_flip": Adapter(_as_it_is, admits=_same_number),
    "complex_arithmetic": Adapter(_as_it_is, admits=_finite),
    "puzzle24": Adapter(_as_it_is, admits=_its_numbers),
}

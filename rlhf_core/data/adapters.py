"""Where we put reasoning-gym's problems, or read answers to them, in another way than the library.

Its instructions take 200 tokens where ours take 20.

Imports nothing of the library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from rlhf_core.data.problems import Problem


class Adapter(NamedTuple):
    """How one task is put, and how an answer to it is read."""

    problem: Callable[[Mapping[str, Any]], Problem]
    """From the library's record."""
    reread: Callable[[str], str] = str.strip
    """Returns an answer in the form that the library's scorer expects."""
    exact: bool = False
    """There is but one right answer, so that comparing with it is as good as the library's scorer."""
    admits: Callable[[str, Mapping[str, Any]], bool] | None = None
    """What the library's scorer forgets to ask of an answer to a record; without it the answer is wrong. What it raises
    counts as no."""


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
    """The library takes "False" for true, as it is not empty, and finds every answer right."""
    return answer.casefold() == str(item["answer"]).casefold()


def _same_share(answer: str, item: Mapping[str, Any]) -> bool:
    """The library gives the full score to any beginning of the right number, such as 0 for 0.375."""
    return abs(Fraction(answer) - Fraction(str(item["answer"]))) <= _SHARE_ROUNDING


def _finite(answer: str, item: Mapping[str, Any]) -> bool:
    """The library finds no distance between nan and the right number."""
    del item
    return "nan" not in answer.casefold() and "inf" not in answer.casefold()


def _its_numbers(answer: str, item: Mapping[str, Any]) -> bool:
    """The library takes any four numbers that make 24, whatever the problem's."""
    return sorted(map(int, re.findall("[0-9]+", answer))) == sorted(item["metadata"]["numbers"])


_SHARE_ROUNDING = Fraction(1, 10_000)
"""The library's own tolerance."""

ADAPTERS: dict[str, Adapter] = {
    "number_sorting": Adapter(_number_sorting, _as_list, exact=True),
    "palindrome_generation": Adapter(_palindrome_generation, _without_blanks),
    "countdown": Adapter(_countdown),
    "game_of_life_halting": Adapter(_as_it_is, admits=_same_word),
    "coin_flip": Adapter(_as_it_is, admits=_same_share),
    "complex_arithmetic": Adapter(_as_it_is, admits=_finite),
    "puzzle24": Adapter(_as_it_is, admits=_its_numbers),
}

"""The exact verifier: whether a response is the right answer in its tags. No text makes it fail."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import NamedTuple

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_MINUS = str.maketrans("\u2212", "-")
_THOUSANDS = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")


class Verdict(NamedTuple):
    """What the verifier makes of a response."""

    score: float
    """1 if the answer is right, else 0."""
    well_formed: bool
    """The whole response is one answer in its tags, and the model ended it."""
    failure: str | None = None
    """Why nobody knows whether the answer is right (`rewards.abstaining.failure`); then the score is 0."""


def verify(response: str, answer: str, *, ended: bool, tag: str) -> Verdict:
    """Return whether a response is `<tag>...</tag>` and nothing else, and holds the answer.

    White space around the tags makes no difference. The two texts are compared word by word: numbers by value
    ("1,000", "1000" and "1000.0" are equal, and a minus sign is a hyphen), everything else letter by letter.
    A comma between groups of three digits may be the thousands' separator or part a list; any other comma is
    white space; the response is right if one reading of it equals one reading of the answer.

    Args:
        response: decoded, without its stop token.
        answer: the right one.
        ended: whether a stop token ended the response; one that was cut off is not well formed.
        tag: name of the tags.

    Returns:
        The verdict; an ill-formed response scores 0.

    Example:
        >>> verify("<answer>61 58, 50</answer>", "61 58 50", ended=True, tag="answer")
        Verdict(score=1.0, well_formed=True, failure=None)
    """
    well_formed = is_well_formed(response, ended=ended, tag=tag)
    right = well_formed and not _readings(_inner(response, tag)).isdisjoint(_readings(answer))
    return Verdict(float(right), well_formed)


def is_well_formed(response: str, *, ended: bool, tag: str) -> bool:
    """Return whether a response that the model ended is `<tag>...</tag>` and nothing else but white space."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    inner = _inner(response, tag)
    return ended and response.strip() == opening + inner + closing and opening not in inner and closing not in inner


def _inner(response: str, tag: str) -> str:
    return response.strip().removeprefix(f"<{tag}>").removesuffix(f"</{tag}>")


def _readings(text: str) -> set[tuple[str | Decimal, ...]]:
    text = text.translate(_MINUS)
    joined = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    return {_words(text), _words(joined)}


def _words(text: str) -> tuple[str | Decimal, ...]:
    return tuple(Decimal(word) if _NUMBER.fullmatch(word) else word for word in text.replace(",", " ").split())

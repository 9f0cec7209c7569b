"""Faults of an answer that its score may not show: it is empty, goes round in a loop, or says the prompt again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from rlhf_core.data.transcripts import turns

_LOOP = re.compile(r"(.{1,80}?)\1{3,}", re.DOTALL)
LOOP_LENGTH = 40
"""Characters of a loop that counts: shorter ones are numbers, rules and the like."""
_NGRAM, _LEAST_WORDS, _LEAST_DISTINCT = 4, 24, 0.5
_SAID_AGAIN, _LEAST_SAID_AGAIN = 60, 16
_COMMON = 4
"""Problems that share an answer before it is called the same answer to all."""


def is_empty(response: str) -> bool:
    """Return whether an answer says nothing: white space alone, or not even that."""
    return not response.strip()


def loops(response: str) -> bool:
    """Return whether an answer goes round in a loop.

    Either a piece of up to 80 characters follows itself at least three times, over at least 40 characters and half of
    the answer; or of at least 24 words less than half of the sequences of four are different.

    Example:
        >>> loops("I can help. " * 4), loops("10 + 10 + 10 = 30"), loops("=" * 20)
        (True, False, False)
    """
    if len(response) < LOOP_LENGTH:
        return False
    runs = [found.end() - found.start() for found in _LOOP.finditer(response)]
    if runs and max(runs) >= LOOP_LENGTH and 2 * max(runs) >= len(response.strip()):
        return True
    words = response.casefold().split()
    grams = list(zip(*(words[start:] for start in range(_NGRAM)), strict=False))
    return len(words) >= _LEAST_WORDS and len(set(grams)) < _LEAST_DISTINCT * len(grams)


def copies_prompt(prompt: str, response: str) -> bool:
    """Return whether an answer begins with what it was asked: the first 60 characters, or all if these are less.

    Case and white space do not count; of a transcript the last turn of a person's counts. A question of fewer than 16
    characters is never said to be copied.

    Example:
        >>> copies_prompt("Which numbers are prime?", "which numbers are  prime? Which"), copies_prompt("Hi!", "Hi!")
        (True, False)
    """
    said = [turn["content"] for turn in turns(prompt) or () if turn["role"] == "user"]
    asked = _plain(str(said[-1]) if said else prompt)[:_SAID_AGAIN]
    return len(asked) >= _LEAST_SAID_AGAIN and _plain(response).startswith(asked)


def same_answers(responses: Sequence[str], right: Sequence[bool]) -> list[bool]:
    """Return which answers are the most common one, though it is not right there.

    An answer that several problems rightly share is no fault, and one that only three or fewer have is none either.

    Args:
        responses: to different problems.
        right: whether each is right; all False where nobody knows.

    Example:
        >>> same_answers(["yes"] * 4 + ["no"], [True, False, False, False, False])
        [False, True, True, True, False]
    """
    plain = [_plain(response) for response in responses]
    common, count = Counter(plain).most_common(1)[0] if plain else ("", 0)
    if count < _COMMON or not common:  # an empty one is another fault
        return [False] * len(plain)
    return [each == common and not good for each, good in zip(plain, right, strict=True)]


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())

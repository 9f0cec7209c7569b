"""Is a mathematical answer right? coati's function for competitions over text, with math-verify behind it.

Imports sympy by way of math-verify, at once: a response's time limit is not for imports. No torch.
"""

from __future__ import annotations

import logging
import re
import threading

import math_verify

from rlhf_core.rewards.math_answers import graded, number, same_number
from rlhf_core.rewards.structure import Tags

STEP_S = 2
"""Longest time of each step of math-verify: reading an answer, comparing two."""

_GAP = re.compile(r"(?<=[0-9])\s+(?=[0-9])")
_ARGUMENTS = re.compile(r"(\\[dt]?frac\s*[0-9])\s+(?=[0-9])")
"""Between a command's two arguments of one digit: LaTeX reads `\\frac 1 2` and `\\frac 12` alike."""
_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # what it cannot read is no news


def math_competition_score(prompt: str, response: str, answer: str | None, *, tags: Tags | None = None) -> float:
    r"""Return 10 for the right answer in the right form, 1 for the form alone, else 0.

    Answers are equal if they are the same text (but for capitals, and white space that is not between digits), the
    same number, or if math-verify finds them equal as expressions, sets, intervals or equations: `\frac 1 2` is
    0.5. Numbers are compared as by `gsm8k_score`; math-verify looks past units ("5 cm" is 5).

    Args:
        prompt: not looked at.
        response: without its stop token.
        answer: the reference; None and a blank one score 0.
        tags: the form, in coati's notation.
    """
    del prompt
    return graded(response, answer, tags, same_expression)


def same_expression(reference: str, given: str) -> bool:
    """Return whether two answers are the same text, number or expression."""
    if number(reference) is not None and number(given) is not None:
        return same_number(reference, given)
    if _bare(reference) == _bare(given):
        return bool(given)
    # "1 2" would be read as twelve, "3 1/2" as 31/2: no two texts are one for a space between digits
    return not _spaced(reference) and not _spaced(given) and _verified(reference, given)


def _bare(text: str) -> str:
    """Return the text without capitals and white space, of which one space stays between digits."""
    return _SPACE.sub("", _GAP.sub(" ", text)).strip("$").casefold()


def _spaced(text: str) -> bool:
    return _GAP.search(_ARGUMENTS.sub(r"\1", text)) is not None


def _verified(reference: str, given: str) -> bool:
    # its time limit is an alarm signal, which the main thread alone gets; elsewhere the caller limits the time
    limit = STEP_S if threading.current_thread() is threading.main_thread() else None
    wanted, found = (math_verify.parse(f"${text.strip('$')}$", parsing_timeout=limit) for text in (reference, given))
    return bool(wanted and found and math_verify.verify(wanted, found, timeout_seconds=limit))

"""Is a number the right answer? coati's GSM8K function over text: 0, 1 for the form, 10 for the answer.

Imports no torch: the process that runs reward functions starts in a moment.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from rlhf_core.rewards.notation import LONGEST, plain
from rlhf_core.rewards.structure import Tags, extract_answer, validate_response_structure

RIGHT, FORM = 10.0, 1.0
FINAL_ANSWER = "####"
_WHOLE, _HIGHEST_POWER = r"[+-]?[0-9]+", r"[+-]?0*[0-9]{1,3}"
_DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_AROUND = re.compile(r"([+-]?)\s*\$?\s*([+-]?)(.*?)\s*\$?\s*%?", re.DOTALL)
_PLAIN = re.compile(rf"({_DECIMAL})(?:[eE]({_HIGHEST_POWER}))?")
_POWER_OF_TEN = re.compile(rf"(?:({_DECIMAL})\s*\\cdot\s*)?10\^\{{({_HIGHEST_POWER})\}}")
_QUOTIENT = re.compile(r"(?P<whole>)(?P<over>[0-9]+)\s*/\s*(?P<under>[0-9]+)")
_LATEX_QUOTIENT = re.compile(rf"(?P<whole>[0-9]*)\s*\\frac\{{(?P<over>{_WHOLE})\}}\{{(?P<under>{_WHOLE})\}}")
_COMMA = re.compile(r"(?<=[0-9]),(?=[0-9])")


def gsm8k_score(prompt: str, response: str, answer: str | None, *, tags: Tags | None = None) -> float:
    """Return 10 for the right number in the right form, 1 for the form alone, else 0.

    The reference may be GSM8K's whole solution, ending in `#### 42`. Numbers are compared by value: "1,000",
    "1000.0" and "$1000" are one. Dollars are not looked at. Where one of the two alone has a per cent sign, the other
    is a share: "50%" is right for 0.5, "150%" for 1.5, "100%" for 1. Beside a reference in per cent an answer from 1
    on (its sign aside) may be in per cent without the sign: "50" is right for 50%, but "50%" is not for 50.

    Args:
        prompt: not looked at.
        response: without its stop token.
        answer: the reference; None and a blank one score 0.
        tags: the form, in coati's notation.
    """
    del prompt
    return graded(response, answer, tags, same_number)


def final_answer(reference: str) -> str:
    """Return what stands after the last `####`, without the commas of one number; without the mark, all of it.

    Example:
        >>> final_answer("100 x 10 #### $1,000"), final_answer("#### (1,200)"), final_answer("1,000")
        ('$1000', '(1,200)', '1,000')
    """
    _, marked, answer = reference.rpartition(FINAL_ANSWER)
    answer = answer.strip()
    if not marked or number(answer) is None:  # elsewhere a comma may part the members of a pair
        return answer
    return _COMMA.sub("", answer)


def number(text: str) -> Fraction | None:
    r"""Return the value of a text that is one number and nothing else; None if it is not.

    Any notation that `notation.plain` knows will do, with powers of ten below 1000; a sign of dollar before the
    number or after it, and a per cent sign at its end, are no part of it.

    Example:
        >>> number("$1,000.50."), number("-\\frac{1}{2}"), number("2.5e3"), number("3 1/2"), number("1,00")
        (Fraction(2001, 2), Fraction(-1, 2), Fraction(2500, 1), Fraction(7, 2), None)
    """
    if len(text) > LONGEST:
        return None
    around = _AROUND.fullmatch(plain(text))
    if around is None or (around[1] and around[2]):
        return None
    value = _unsigned(around[3])
    return -value if value is not None and "-" in (around[1], around[2]) else value


def _unsigned(text: str) -> Fraction | None:
    if match := _PLAIN.fullmatch(text):
        return Fraction(match[1]) * Fraction(10) ** int(match[2] or 0)
    if match := _POWER_OF_TEN.fullmatch(text):
        return Fraction(match[1] or 1) * Fraction(10) ** int(match[2])
    match = _LATEX_QUOTIENT.fullmatch(text) or _QUOTIENT.fullmatch(text)
    if match is None or not int(match["under"]):
        return None
    whole, part = match["whole"], Fraction(int(match["over"]), int(match["under"]))
    if whole and not 0 < part < 1:  # a product, to some
        return None
    return int(whole or 0) + part


def graded(response: str, answer: str | None, tags: Tags | None, same: Callable[[str, str], bool]) -> float:
    """Return 10, 1 or 0 for a response, by its form and by what `same` says of reference and answer."""
    given = extract_answer(response, tags)
    wanted = "" if answer is None else final_answer(answer)
    if not wanted or given is None or not validate_response_structure(response, tags):
        return 0.0
    return RIGHT if same(wanted, given) else FORM


def same_number(reference: str, given: str) -> bool:
    """Return whether two texts are one number; where the reference is none, whether they are one text."""
    wanted, found = number(reference), number(given)
    if wanted is None or found is None:
        return wanted is None and (reference == given or plain(reference) == plain(given) != "")
    if ("%" in reference) == ("%" in given):
        return wanted == found
    if "$" in plain(reference) + plain(given):  # dollars are no share of anything
        return False
    if "%" in given:
        return found == 100 * wanted
    return wanted == 100 * found or (wanted == found and abs(found) >= 1)

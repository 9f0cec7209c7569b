"""Is a number the right answer? coati's GSM8K function over text: 0, 1 for the form, 10 for the answer.

Imports no torch: the process that runs reward functions starts in a moment.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from rlhf_core.rewards.structure import Tags, extract_answer, validate_response_structure

RIGHT, FORM = 10.0, 1.0
FINAL_ANSWER = "####"
_LONGEST_NUMBER = 1000
_NUMBER = r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+"
_PLAIN = re.compile(rf"([+-]?)(?:{_NUMBER})")
_QUOTIENT = re.compile(r"([+-]?)([0-9]+)\s*/\s*([0-9]+)")
_LATEX_QUOTIENT = re.compile(r"([+-]?)\\[dt]?frac\s*\{\s*([+-]?[0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}")
_COMMA = re.compile(r"(?<=[0-9]),(?=[0-9])")
_DRESSING = (("\\$", ""), ("$", ""), ("\\!", ""), ("\\,", ""), ("{,}", ","), ("\\%", ""), ("%", ""))


def gsm8k_score(prompt: str, response: str, answer: str | None, *, tags: Tags | None = None) -> float:
    """Return 10 for the right number in the right form, 1 for the form alone, else 0.

    The reference may be GSM8K's whole solution, ending in `#### 42`. Numbers are compared by value: "1,000",
    "1000.0" and "$1000" are one. Dollars are not looked at. Where one of the two alone has a per cent sign, the other
    may be a share, and from 1 on (its sign aside) in per cent as well: "50%" is right for 0.5 and for 50, "150%" for
    1.5, "100%" and "1%" for 1, but "0.5%" is not for 0.5.

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

    Signs of dollar and per cent, a full stop at the end and the commas between groups of three digits are
    no part of it; `1/2` and `\frac{1}{2}` are numbers.

    Example:
        >>> number("$1,000.50."), number("-\\frac{1}{2}"), number("1,00")
        (Fraction(2001, 2), Fraction(-1, 2), None)
    """
    if len(text) > _LONGEST_NUMBER:
        return None
    for dress, bare in _DRESSING:
        text = text.replace(dress, bare)
    text = text.strip().removesuffix(".")
    for pattern in (_QUOTIENT, _LATEX_QUOTIENT):
        match = pattern.fullmatch(text)
        if match and int(match[3]):
            return (-1 if match[1] == "-" else 1) * Fraction(int(match[2]), int(match[3]))
    return Fraction(text.replace(",", "")) if _PLAIN.fullmatch(text) else None


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
        return wanted is None and reference == given
    if ("%" in reference) == ("%" in given):
        return wanted == found
    in_per_cent, bare = (wanted, found) if "%" in reference else (found, wanted)
    return in_per_cent == 100 * bare or (in_per_cent == bare and abs(bare) >= 1)

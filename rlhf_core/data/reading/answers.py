r"""The final answer of a row, and the solution before it: GSM8K's `#### 42`, competition mathematics' `\boxed{42}`."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from rlhf_core.data.reading.rows import RowError, text_fields, wrong_kind
from rlhf_core.rewards.math_answers import FINAL_ANSWER, final_answer

if TYPE_CHECKING:
    from collections.abc import Mapping

_CALCULATOR = re.compile(r"<<[^<>]*>>")
_BOX = re.compile(r"\\f?box(?:ed)?(?![a-z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def stated_answer(text: str, where: str) -> str:
    """Return the `final_answer` of a row.

    Raises:
        RowError: if nothing is left.
    """
    answer = final_answer(text)
    if not answer:
        place = f" after {FINAL_ANSWER!r}" if FINAL_ANSWER in text else ""
        raise RowError(f"{where}: field 'answer' holds no answer{place}", "blank answer")
    return answer


def answer_text(row: Mapping[str, Any], where: str, name: str = "answer") -> str:
    """Return an answer's text; a number is taken as it is written.

    Raises:
        RowError: if the field is missing, or neither a text nor a finite number.
    """
    value = row.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float | Decimal) and math.isfinite(value):
        return f"{value:f}" if isinstance(value, Decimal) else str(value)
    if name in row and not isinstance(value, str):
        raise wrong_kind(where, name, "a string", value)
    return text_fields(row, where, (name,))[0]


def boxed_answer(solution: str, where: str) -> str:
    r"""Return what stands in the last box of a solution.

    Raises:
        RowError: if there is no box, or it holds nothing or is never closed.

    Example:
        >>> boxed_answer(r"So it is \boxed{\frac{1}{2}}.", "row 1")
        '\\frac{1}{2}'
    """
    boxes = list(_BOX.finditer(solution))
    answer = _boxed(solution[boxes[-1].end() :]) if boxes else None
    if not answer:
        what = r"has no \boxed{...}" if not boxes else r"has a last \boxed{...} that is empty or not closed"
        raise RowError(rf"{where}: field 'solution' {what}, so the answer is not known", "no boxed answer")
    return answer


def _boxed(text: str) -> str | None:
    if not text.startswith("{"):
        return text.partition("$")[0].strip()  # TeX boxes what follows, up to the formula's end as they are written
    depth = 0
    for brace in _BRACE.finditer(text):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)  # an escaped brace is a character
        if not depth and brace[0] == "}":
            return text[1 : brace.start()].strip()
    return None


def worked_solution(text: str) -> str:
    """Return what GSM8K writes before the final answer, without its calculator's marks (`<<6*7=42>>`)."""
    return _CALCULATOR.sub("", text.rpartition(FINAL_ANSWER)[0]).strip()


def demonstrated(solution: str, answer: str) -> str:
    """Return the response that a solution and its answer make: `<think>...</think><answer>...</answer>`."""
    return f"<think>{solution}</think><answer>{answer}</answer>"


def is_demonstrated(response: str, answer: str) -> bool:
    """Return whether a response is as `demonstrated` writes one with this answer."""
    return response.startswith("<think>") and response.endswith(f"</think><answer>{answer}</answer>")

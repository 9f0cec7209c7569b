r"""A row as its file has it, and what is taken from its fields: texts, numbers, final answers.

A final answer may stand behind `####`, as GSM8K writes it, or in a `\boxed{}`, as competition mathematics does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.errors import DataError
from rlhf_core.rewards.math_answers import FINAL_ANSWER, final_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_LONGEST_SHOWN = 20
_KINDS = {
    bool: "a boolean",
    int | float | Decimal: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    bytes: "bytes",
    date | time | timedelta: "a time",
}
_CALCULATOR = re.compile(r"<<[^<>]*>>")
_BOX = re.compile(r"\\f?box(?:ed)?(?![a-z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


class Row(NamedTuple):
    """A row whose fields could be read."""

    where: str
    """Names it in an error, such as "row 3 of pairs.jsonl"."""
    fields: dict[str, Any]


@dataclass(frozen=True)
class RejectedRow:
    """A row that cannot be learnt from."""

    where: str
    """Names it, such as "row 3 of pairs.jsonl"."""
    reason: str
    """A category, the same for every row with this fault."""
    detail: str
    """The whole sentence: what was expected, what came, what to do."""


Scan = Iterator[Row | RejectedRow]
"""What a file's rows are: each can be read, or says why not."""


class RowError(DataError):
    """A row that cannot be learnt from; the rows after it can still be read."""

    def __init__(self, detail: str, reason: str) -> None:
        """Take the whole sentence, and the category of the fault."""
        super().__init__(detail, reason)
        self.detail = detail
        self.reason = reason

    def __str__(self) -> str:
        return self.detail


def text_fields(row: Mapping[str, Any], where: str, names: tuple[str, ...]) -> list[str]:
    """Return the values of the named fields.

    Raises:
        RowError: if one is missing or not a string; the fields found are listed.
    """
    missing = [name for name in names if name not in row]
    if missing:
        found = ", ".join(map(repr, row)) or "none"
        raise RowError(
            f"{where} lacks {' and '.join(map(repr, missing))}; expected the fields "
            f"{' and '.join(map(repr, names))}, found {found}",
            f"no field {missing[0]!r}",
        )
    for name in names:
        if not isinstance(row[name], str):
            raise wrong_kind(where, name, "a string", row[name])
    return [row[name] for name in names]


def optional_text(row: Mapping[str, Any], where: str, name: str) -> str | None:
    """Return the value of a field that may be absent or null.

    Raises:
        RowError: if it is not a string.
    """
    return None if row.get(name) is None else text_fields(row, where, (name,))[0]


def number_field(row: Mapping[str, Any], where: str, name: str, *, default: float) -> float:
    """Return the value of a field that may be absent or null: a finite number, at least 0.

    A file of texts alone, as CSV is, may have the number as a text; a blank one is an absent one.

    Raises:
        RowError: if it is something else.
    """
    value = row.get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
        return default
    number = _number(value)
    if number is None:
        raise wrong_kind(where, name, "a number", value)
    if not 0 <= number < math.inf:
        shown = str(value)
        shown = shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}... ({len(shown)} characters)"
        raise RowError(
            f"{where}: field {name!r} must be finite in float64 and at least 0, but is {shown}",
            f"field {name!r} out of range",
        )
    return number


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal | str):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except ValueError:
        return None


def wrong_kind(where: str, name: str, wanted: str, value: Any) -> RowError:
    """Return the error of a field of another type than the wanted one."""
    return RowError(
        f"{where}: field {name!r} must be {wanted}, but is {kind(value)}", f"field {name!r} is not {wanted}"
    )


def kind(value: Any) -> str:
    """Return JSON's word for a value, and a plain one for what JSON has no word for."""
    if value is None:
        return "null"
    if isinstance(value, float) and not math.isfinite(value):
        return f"the number {value}"
    return next((word for type_, word in _KINDS.items() if isinstance(value, type_)), f"of type {type(value).__name__}")


def as_written(fields: dict[str, Any], short: Mapping[str, Callable[[float], Any]]) -> dict[str, Any]:
    """Return a row with the numbers of short columns as they were written: 0.1, not 0.10000000149011612.

    Args:
        fields: the row, with numbers as float64.
        short: numpy's type of the columns that are float16 or float32, by name.
    """
    if not short:
        return fields
    numbers = {name: type_ for name, type_ in short.items() if fields[name] is not None}
    return fields | {name: float(str(type_(fields[name]))) for name, type_ in numbers.items()}


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

"""A row as its file has it, with the words that name it, and what may be wrong with its fields."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import date, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.data.reading.results import RejectedRow
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rlhf_core.data.reading.messages import MessageView


class Row(NamedTuple):
    """A row whose fields could be read."""

    where: str
    """Names it in an error, such as "row 3 of pairs.jsonl"."""
    fields: dict[str, Any]
    view: MessageView | None = None
    """What the model is shown of its messages; None before that is asked."""


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
Scan = Iterator[Row | RejectedRow]
"""What a file's rows are: each can be read, or says why not."""


class RowError(DataError):
    """A row that cannot be learnt from; the rows after it can be read all the same."""

    def __init__(self, detail: str, reason: str) -> None:
        """Take the whole sentence, and the category of the fault."""
        super().__init__(detail, reason)
        self.detail = detail
        self.reason = reason

    def __str__(self) -> str:
        return self.detail


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

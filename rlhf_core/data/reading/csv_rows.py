"""Rows of CSV: the first line names the columns, and every row has as many fields as there are columns."""

from __future__ import annotations

import csv
import re
from typing import TYPE_CHECKING

from rlhf_core.counting import counted
from rlhf_core.data.reading.results import RejectedRow
from rlhf_core.data.reading.rows import Row, Scan
from rlhf_core.data.reading.text import byte_lines, encoding_fault
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WRONG_COUNT, HEADER_AGAIN = "wrong number of fields", "names of columns again"
_LONGEST_FIELD = 2**26
"""Characters; a longer one is a mistake, and would take the whole file into memory."""
_FIRST_LINE_ENDS_IN_CR = re.compile(r'(?:"[^"]*"|[^"\r\n])*\r(?!\n)')
_AFTER_CR = re.compile(r"(?<=\r)(?!\n)")


def csv_rows(file: Path, name: str, *, delimiter: str = ",") -> Scan:
    """Yield the rows of a file of comma-separated values, all texts; blank lines are passed over.

    Args:
        file: plain or gzip. A field that holds commas, quotes or line ends stands in double quotes, and a
            quote within it is doubled (RFC 4180). Lines may end in a carriage return alone, if the first one does.
        name: what an error calls it.
        delimiter: what stands between fields.

    Raises:
        DataError: if the file cannot be read, is damaged or not UTF-8, is empty, has a column without a name or
            two of one name, or a quotation is malformed: where the next row begins is not known then.
    """
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_FIELD))  # of the process; a higher one hurts nobody
    reader = csv.reader(_lines(file, name), strict=True, delimiter=delimiter)
    columns: list[str] = []
    empty = True
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise DataError(f"line {line} of {name} is not valid CSV: {_reason(str(error), delimiter)}") from error
        if fields is None:
            break
        if not fields or (not columns and len(fields) == 1 and not fields[0].strip()):
            continue
        if not columns:
            columns = _checked_header(fields, name)
            continue
        empty = False
        yield _row(fields, columns, f"line {line} of {name}")
    if empty:
        found = "holds the names of columns and no row" if columns else "is empty"
        raise DataError(f"{name} {found}; it should hold a line that names the columns, and a line for each row")


def _row(fields: list[str], columns: list[str], where: str) -> Row | RejectedRow:
    names = [fields[0].removeprefix("\ufeff").strip().strip('"'), *(field.strip() for field in fields[1:])]
    if len(columns) > 1 and names == columns:
        detail = f"{where} names the columns again, as files that were joined do; take the line out"
        return RejectedRow(where, HEADER_AGAIN, detail)
    if len(fields) == len(columns):
        return Row(where, dict(zip(columns, fields, strict=True)))
    hint = "; put double quotes around a field that holds a comma" if len(fields) > len(columns) else ""
    detail = (
        f"{where} has {counted(len(fields), 'field')}, but the first line names {counted(len(columns), 'column')} "
        f"({', '.join(map(repr, columns))}){hint}"
    )
    return RejectedRow(where, WRONG_COUNT, detail)


def _checked_header(fields: list[str], name: str) -> list[str]:
    columns = [field.strip() for field in fields]
    for number, column in enumerate(columns, start=1):
        if not column:
            raise DataError(f"column {number} of {name} has no name; the first line must name every column")
        if column in columns[: number - 1]:
            raise DataError(f"{name} has two columns named {column!r}; rename one of them in its first line")
    return columns


def _lines(file: Path, name: str) -> Iterator[str]:
    ends_in_cr: re.Match[str] | None = None
    for number, line in byte_lines(file, name):
        fault = encoding_fault(line, f"line {number} of {name}")
        if fault:
            raise DataError(fault)
        text = line.decode("utf-8")
        if number == 1:
            ends_in_cr = _FIRST_LINE_ENDS_IN_CR.match(text)
        yield from filter(None, _AFTER_CR.split(text)) if ends_in_cr else (text,)


def _reason(said: str, delimiter: str) -> str:
    """Return what is malformed, by what `csv` says, which is meant for who calls it."""
    if said.startswith("new-line character"):
        return "a field holds a carriage return; put double quotes around the field, or take it out"
    if said.startswith("unexpected end"):
        return "a double quote that opens there is not closed, or stands in a field and is not doubled"
    if said.startswith("field larger"):
        return (
            f"a field goes on for more than {csv.field_size_limit():,} characters: a double quote that opens there is "
            "probably not closed"
        )
    if "expected after" in said:
        found = "a tab" if delimiter == "\t" else repr(delimiter)
        return f"neither {found} nor the line's end follows a closing double quote; write a quote in a field twice"
    return said

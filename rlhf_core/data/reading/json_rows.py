"""Rows of JSON: a line each, or the elements of one array."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rlhf_core.data.reading.local import existing_file
from rlhf_core.data.reading.results import RejectedRow
from rlhf_core.data.reading.rows import Row, Scan, kind
from rlhf_core.data.reading.text import byte_lines, encoding_fault
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

NOT_UTF8, NOT_JSON, NO_OBJECT = "not UTF-8", "not valid JSON", "not a JSON object"


def read_rows(path: str | Path) -> Generator[tuple[str, dict[str, Any]]]:
    """Yield each row of a file of JSON objects, with the words that name it in an error.

    Args:
        path: file of JSON lines, also as gzip.

    Yields:
        Pairs like ("row 3 of pairs.jsonl", {...}).

    Raises:
        DataError: if the file is missing, a directory, unreadable, not UTF-8, damaged, empty, or a row is
            not a JSON object.
    """
    file = existing_file(path)
    for row in json_lines(file, str(file)):
        if isinstance(row, RejectedRow):
            raise DataError(row.detail)
        yield row.where, row.fields


def json_lines(file: Path, name: str) -> Scan:
    """Yield the rows of a file of JSON lines.

    Blank lines are passed over; they count in the row numbers, which are those of an editor.

    Raises:
        DataError: if the file cannot be read, is damaged, or is empty.
    """
    empty = True
    for number, line in byte_lines(file, name):
        if line.strip():
            empty = False
            yield _of_line(line, f"row {number} of {name}")
    if empty:
        raise DataError(f"{name} is empty; it should hold one JSON object per line")


def json_array(file: Path, name: str) -> Scan:
    """Yield the elements of a file that is one JSON array.

    Raises:
        DataError: if the file cannot be read, is damaged or not UTF-8, is no valid JSON, or is empty.
    """
    lines = []
    for number, line in byte_lines(file, name):
        fault = encoding_fault(line, f"line {number} of {name}")
        if fault:
            raise DataError(fault)
        lines.append(line)
    try:
        rows = json.loads(b"".join(lines))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{name} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    except (RecursionError, ValueError) as error:
        raise DataError(f"{name} is not usable JSON: {error}") from error
    if not rows:
        raise DataError(f"{name} is empty: its array holds no row")
    for number, row in enumerate(rows, start=1):
        yield _of_value(row, f"row {number} of {name}")


def _of_line(line: bytes, where: str) -> Row | RejectedRow:
    fault = encoding_fault(line, where)
    if fault:
        return RejectedRow(where, NOT_UTF8, fault)
    try:
        return _of_value(json.loads(line), where)
    except json.JSONDecodeError as error:
        return RejectedRow(where, NOT_JSON, f"{where} is not valid JSON: {error.msg} at column {error.colno}")
    except (RecursionError, ValueError) as error:  # nested too deeply; an integer of too many digits
        return RejectedRow(where, NOT_JSON, f"{where} is not usable JSON: {error}")


def _of_value(value: Any, where: str) -> Row | RejectedRow:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):x}"
        return RejectedRow(
            where, NOT_UTF8, f"{where} holds {half}, half of a character without its other half; write the text again"
        )
    if isinstance(value, dict):
        return Row(where, value)
    detail = f'{where} is {kind(value)}; each row must be a JSON object such as {{"question": ...}}'
    return RejectedRow(where, NO_OBJECT, detail)

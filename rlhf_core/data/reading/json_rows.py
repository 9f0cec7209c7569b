"""Rows of JSON: a line each, or the elements of one array."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from rlhf_core.data.reading.local import existing_file
from rlhf_core.data.reading.results import RejectedRow
from rlhf_core.data.reading.rows import Row, RowError, Scan, kind
from rlhf_core.data.reading.text import BYTE_ORDER_MARK, byte_lines, encoding_fault
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

NOT_UTF8, NOT_JSON, NO_OBJECT, TWICE = "not UTF-8", "not valid JSON", "not a JSON object", "key given twice"
_SPACE = " \t\r\n"
"""All that JSON knows as space."""
_BEGINNING = 2**20
"""Bytes in which a value that goes over several lines is looked for."""


class _KeyTwiceError(ValueError):
    """An object that gives a key twice: stands in its place, until `json.dumps` meets and raises it."""


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
        DataError: if the file cannot be read, is damaged or empty, or its first value is not one line: then no line is
            a row, though some may look like one.
    """
    empty = True
    for number, line in byte_lines(file, name):
        line = line.removeprefix(BYTE_ORDER_MARK)  # noqa: PLW2901  # joined files have several
        if not line.strip():
            continue
        row = _of_line(line, f"row {number} of {name}")
        if empty and isinstance(row, RejectedRow) and row.reason == NOT_JSON:
            _refuse_other_lines(file, name)
        empty = False
        yield row
    if empty:
        raise DataError(f"{name} is empty; it should hold one JSON object per line")


def _refuse_other_lines(file: Path, name: str) -> None:
    text = bytearray()  # grows in place, however many lines there are
    for _, line in byte_lines(file, name):
        text += line
        if len(text) > _BEGINNING:
            break
    beginning = text.decode("utf-8", "replace").strip()
    value: Any = None
    try:
        value, end = json.JSONDecoder().raw_decode(beginning)
    except json.JSONDecodeError as error:
        end = error.pos  # a longer value is right up to where it was cut
        if len(text) <= _BEGINNING or end < len(beginning):
            return
    except (RecursionError, ValueError):
        return
    if beginning[end:].startswith("\r") and not beginning[end:].startswith("\r\n"):
        raise DataError(f"the lines of {name} end in carriage returns alone; end them in line feeds")
    if "\n" not in beginning[:end]:
        return
    what, each = ("array", "'.[]'") if beginning.startswith("[") else ("object", _wrapped_rows(value) or ".")
    raise DataError(
        f"{name} seems to hold a JSON {what} over several lines, but JSON lines need one object a line; write it "
        f"again, as `jq -c {each}` does"
    )


def wrapped_hint(row: dict[str, Any]) -> str:
    """Return what to do about a row that holds rows, to stand behind an error; nothing if it holds none."""
    rows = _wrapped_rows(row)
    return f"; if its rows are in it, write a line each, as `jq -c {rows}` does" if rows else ""


def _wrapped_rows(value: Any) -> str | None:
    """Return what `jq -c` needs to write the rows a line each of which an object holds a list, as `'.data[]'`."""
    lists = value.items() if isinstance(value, dict) else ()
    found = next((key for key, rows in lists if isinstance(rows, list) and rows and all(map(_may_be_row, rows))), None)
    if found is None:
        return None
    return f"'.{found}[]'" if found.isascii() and found.isidentifier() else f"'.[{json.dumps(found)}][]'"


def _may_be_row(value: Any) -> bool:
    """Return whether a value may be a row: a message of a row, or a call of a tool, is an object too."""
    return isinstance(value, dict) and {"role", "from", "type", "function"}.isdisjoint(value)


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
        rows = _loaded(b"".join(lines).decode())
    except (RecursionError, ValueError) as error:
        raise DataError(f"{name} {json_fault(error)}") from error
    if not rows:
        raise DataError(f"{name} is empty: its array holds no row")
    for number, row in enumerate(rows, start=1):
        where = f"row {number} of {name}"
        try:
            yield _row(_checked(row, where), where)
        except RowError as error:
            yield RejectedRow(where, error.reason, error.detail)


def json_value(text: str, where: str) -> Any:
    """Return what a JSON text says.

    Args:
        text: the JSON.
        where: names it in an error.

    Raises:
        RowError: if it is not JSON, gives a key twice in an object, or holds half of a character.
    """
    try:
        value = _loaded(text)
    except (RecursionError, ValueError) as error:
        raise RowError(f"{where} {json_fault(error)}", NOT_JSON) from error
    return _checked(value, where)


def _loaded(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _KeyTwiceError:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    counts = Counter(key for key, _ in pairs)
    return _KeyTwiceError(counts.most_common(1)[0][0])


def json_fault(error: RecursionError | ValueError) -> str:
    """Return why `json` refuses a text, to stand behind its name."""
    if isinstance(error, RecursionError):
        return "is not usable JSON: it is nested too deeply"
    if not isinstance(error, json.JSONDecodeError):
        return "is not usable JSON: it holds a whole number of thousands of digits"
    line = f"line {error.lineno}, " if "\n" in error.doc.strip() else ""
    python = (
        "; single quotes are Python's: write JSON with json.dumps" if error.doc[error.pos :].startswith("'") else ""
    )
    return f"is not valid JSON: {error.msg.rstrip(': ').removesuffix(' at')} at {line}column {error.colno}{python}"


def _checked(value: Any, where: str) -> Any:
    try:
        json.dumps(value, ensure_ascii=False, default=_raised).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):x}"
        raise RowError(
            f"{where} holds {half}, half of a character without its other half; write the text again", NOT_UTF8
        ) from error
    except _KeyTwiceError as error:
        raise RowError(
            f"{where} gives the key {error.args[0]!r} twice in one object; take one of the two out", TWICE
        ) from error
    return value


def _raised(stand_in: Exception) -> None:
    raise stand_in


def _of_line(line: bytes, where: str) -> Row | RejectedRow:
    fault = encoding_fault(line, where)
    if fault:
        return RejectedRow(where, NOT_UTF8, fault)
    try:
        return _row(json_value(line.decode().rstrip(_SPACE), where), where)
    except RowError as error:
        return RejectedRow(where, error.reason, error.detail)


def _row(value: Any, where: str) -> Row | RejectedRow:
    if isinstance(value, dict):
        return Row(where, value)
    detail = f'{where} is {kind(value)}; each row must be a JSON object such as {{"question": ...}}'
    return RejectedRow(where, NO_OBJECT, detail)

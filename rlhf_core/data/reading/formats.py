"""The formats of files, known by name and first bytes, and their rows: JSON, CSV and Parquet, plain or in gzip.

JSON has a row in each line, or is one array. The first line of CSV names the columns, and every row has as many fields.
Text is UTF-8; a line that is damaged or otherwise encoded is named by its number.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from rlhf_core.counting import counted
from rlhf_core.data.reading.rows import RejectedRow, Row, RowError, Scan, as_written, kind
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import pyarrow as pa

_PARQUET_MAGIC = b"PAR1"
_PROBE_BYTES = 4096
_OTHER = {b"PK\x03\x04": "a zip archive", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


class Part(NamedTuple):
    """Some rows of a source: a file's, or a dataset's."""

    name: str
    format: str
    scan: Callable[[], Scan]


def part_of_file(file: Path, name: str | None = None) -> Part:
    """Return the rows of a file.

    Args:
        file: an existing file.
        name: what messages call it; None calls it by its path.

    Raises:
        DataError: if its format is none that we read.
    """
    name = name or str(file)
    start = _first_bytes(file, name)
    suffixes = [suffix.lower() for suffix in file.suffixes if suffix.lower() != ".gz"]
    suffix = suffixes[-1] if suffixes else ""
    if start.startswith(_PARQUET_MAGIC):
        return Part(name, "Parquet", partial(parquet_rows, file, name))
    if suffix == ".parquet":
        what = "is empty" if not start else "is damaged: it is named .parquet but holds no Parquet"
        raise DataError(f"{name} {what}; fetch it again")
    for magic, what in _OTHER.items():
        if start.startswith(magic):
            raise DataError(f"{name} is {what}; unpack it, or pack it with gzip (.gz)")
    if suffix == ".csv":
        return Part(name, "CSV", partial(csv_rows, file, name))
    if suffix == ".tsv":
        return Part(name, "CSV (tabs)", partial(csv_rows, file, name, delimiter="\t"))
    text = start.removeprefix(BYTE_ORDER_MARK).lstrip()
    if suffix != ".jsonl" and text.startswith(b"["):
        return Part(name, "JSON array", partial(json_array, file, name))
    if suffix in {".jsonl", ".json"} or not text or text.startswith(b"{"):
        return Part(name, "JSON lines", partial(json_lines, file, name))
    raise DataError(
        f"{name} is neither JSON lines, a JSON array, nor Parquet, by its first bytes {start[:12]!r}; CSV is known by "
        "its name, which must end in .csv or .csv.gz"
    )


def _first_bytes(file: Path, name: str) -> bytes:
    try:
        with opened(file, name) as stream:
            return stream.read(_PROBE_BYTES)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{name} is damaged: its gzip stream is cut off or invalid ({error}); fetch it again"
        ) from error
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}") from error


GZIP_MAGIC = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_WIDE_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")
_MARK_BYTES = 4


def byte_lines(file: Path, name: str) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers from 1, without a byte order mark at the beginning.

    Args:
        file: plain or gzip, recognised by content; a name in .gz must hold it.
        name: what an error calls it.

    Raises:
        DataError: if it cannot be read, its gzip stream is damaged, or it is UTF-16 or UTF-32.
    """
    number = 0
    try:
        with opened(file, name) as stream:
            _refuse_wide(stream.read(_MARK_BYTES), name)
            stream.seek(0)
            for number, line in enumerate(stream, start=1):
                yield number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{name} is damaged after row {number}: its gzip stream is cut off or invalid ({error}); fetch it again"
        ) from error
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}") from error


def opened(file: Path, name: str) -> BinaryIO:
    """Return a stream of the file's bytes, unpacked if it is gzip.

    Raises:
        DataError: if it is named .gz and holds none.
        OSError: if it cannot be opened.
    """
    with file.open("rb") as probe:
        start = probe.read(len(GZIP_MAGIC))
    if start == GZIP_MAGIC:
        return gzip.open(file, "rb")  # type: ignore[return-value]
    if file.suffix == ".gz" and start:
        raise DataError(f"{name} is named .gz but holds no gzip; fetch it again, or rename it if it is plain text")
    return file.open("rb")


def _refuse_wide(start: bytes, name: str) -> None:
    """Refuse UTF-16 and UTF-32, in which the byte of a line's end is also part of other characters.

    Without a byte order mark they are known by a zero byte beside one of the first characters, which are ASCII in
    JSON, and in the names of columns as a rule (RFC 4627, section 3).
    """
    if start.startswith(_WIDE_MARKS) or (b"\0" in start and start.strip(b"\0")):
        raise DataError(f"{name} is UTF-16 or UTF-32, by its first bytes {start!r}; convert the file to UTF-8")


def encoding_fault(line: bytes, where: str) -> str | None:
    """Return what is wrong with the encoding of a line; None if it is UTF-8 without NUL, which no text has."""
    if b"\0" in line:
        return (
            f"{where} holds a NUL byte at position {line.index(0) + 1}, which no text has: the file is damaged, or "
            "not UTF-8; write it again as UTF-8"
        )
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        return (
            f"{where} is not UTF-8 (byte {line[error.start]:#04x} at position {error.start + 1}); "
            "convert the file to UTF-8"
        )
    return None


NOT_UTF8, NOT_JSON, NO_OBJECT, TWICE = "not UTF-8", "not valid JSON", "not a JSON object", "key given twice"
_SPACE = " \t\r\n"
"""All that JSON knows as space."""
_BEGINNING = 2**20
"""Bytes in which a value that goes over several lines is looked for."""


class _KeyTwiceError(ValueError):
    """An object that gives a key twice: stands in its place, until `json.dumps` meets and raises it."""


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
            yield _json_row(_checked(row, where), where)
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
        return _json_row(json_value(line.decode().rstrip(_SPACE), where), where)
    except RowError as error:
        return RejectedRow(where, error.reason, error.detail)


def _json_row(value: Any, where: str) -> Row | RejectedRow:
    if isinstance(value, dict):
        return Row(where, value)
    detail = f'{where} is {kind(value)}; each row must be a JSON object such as {{"question": ...}}'
    return RejectedRow(where, NO_OBJECT, detail)


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


_BATCH_ROWS = 1024


def parquet_rows(file: Path, name: str) -> Scan:
    """Yield the rows of a Parquet file.

    Raises:
        DataError: if it is damaged, empty, gives two columns (or fields of a column) one name, or holds what Python
            cannot.
    """
    import numpy as np  # noqa: PLC0415  # as pyarrow
    import pyarrow as pa  # noqa: PLC0415  # slow to import, and many never read Parquet
    from pyarrow import parquet  # noqa: PLC0415

    number = 0
    try:
        with parquet.ParquetFile(file) as opened:
            schema = opened.schema_arrow
            _refuse_one_name(schema, name)
            half = {field.name: np.float16 for field in schema if field.type == pa.float16()}
            single = [number for number, field in enumerate(schema) if field.type == pa.float32()]
            for batch in opened.iter_batches(batch_size=_BATCH_ROWS):
                for column in single:  # Arrow writes a number in as few digits as tell it, and is fast
                    texts = batch.column(column).cast(pa.string())
                    batch = batch.set_column(column, schema.names[column], texts.cast(pa.float64()))  # noqa: PLW2901
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(f"row {number} of {name}", as_written(fields, half))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} holds a text after row {number} that is not UTF-8 (byte {error.object[error.start]:#04x} at "
            f"position {error.start + 1}); write it again as UTF-8"
        ) from error
    except (pa.ArrowException, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{name} is damaged: it cannot be read as Parquet ({reason}); fetch it again") from error
    except (OverflowError, ValueError, KeyError) as error:  # after Arrow's own; an unknown time zone is a KeyError
        raise DataError(
            f"{name} holds a value after row {number} that Python cannot hold ({error}); write it again without it"
        ) from error
    if not number:
        raise DataError(f"{name} is empty: its table holds no row")


def _refuse_one_name(fields: Iterable[pa.Field], name: str) -> None:
    known = set()
    for field in fields:
        if field.name in known:
            raise DataError(f"{name} has two columns or fields named {field.name!r}; write it again with one of them")
        known.add(field.name)
        _refuse_one_name(map(field.type.field, range(field.type.num_fields)), name)

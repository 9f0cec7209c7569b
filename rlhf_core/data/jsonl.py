"""JSON lines: rows out of a file (plain or gzip), with every fault named by file and row."""

from __future__ import annotations

import difflib
import gzip
import json
import math
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping
    from typing import BinaryIO

GZIP_MAGIC = b"\x1f\x8b"


def to_jsonl(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Return one line of JSON per row, the same bytes for the same rows."""
    return b"".join(
        json.dumps(row, ensure_ascii=False, sort_keys=True).encode("utf-8", "surrogatepass") + b"\n" for row in rows
    )


def from_jsonl(data: bytes) -> list[dict[str, Any]]:
    """Return the rows of what `to_jsonl` wrote."""
    return [json.loads(line.decode("utf-8", "surrogatepass")) for line in data.split(b"\n") if line.strip()]


def read_rows(path: str | Path) -> Generator[tuple[str, dict[str, Any]]]:
    """Yield each row of a file of JSON objects, with the words that name it in an error.

    Blank lines are passed over; they count in the row numbers, which are those of an editor.

    Args:
        path: file of JSON lines; gzip is recognised by content, and a name in .gz must hold it.

    Yields:
        Pairs like ("row 3 of pairs.jsonl", {...}).

    Raises:
        DataError: if the file is missing, a directory, unreadable, not UTF-8, damaged, empty, or a row is
            not a JSON object.
    """
    file = existing_file(path)
    empty = True
    for number, line in _lines(file):
        where = f"row {number} of {file}"
        text = _decode(line, where).strip()
        if text:
            empty = False
            yield where, _parse(text, where)
    if empty:
        raise DataError(f"{file} is empty; it should hold one JSON object per line")


def existing_file(path: str | Path) -> Path:
    """Return the path if it is a file.

    Raises:
        DataError: if it is not; the nearest name in its directory is offered.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        raise DataError(f"{file} is a directory; give a file of JSON lines (.jsonl or .jsonl.gz) in it")
    if file.exists():
        return file
    if not file.parent.is_dir():
        raise DataError(f"data file {file} does not exist, nor does its directory {file.parent}")
    names = sorted(entry.name for entry in file.parent.iterdir())
    near = difflib.get_close_matches(file.name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {file.parent / near[0]}?" if near else f"; {file.parent} holds {_listed(names)}"
    raise DataError(f"data file {file} does not exist{hint}")


def _listed(names: list[str], most: int = 5) -> str:
    if not names:
        return "nothing"
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with _opened(file) as stream:
            for number, line in enumerate(stream, start=1):
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{file} is damaged after row {number}: its gzip stream is cut off or invalid ({error}); fetch it again"
        ) from error
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error


def _opened(file: Path) -> BinaryIO:
    with file.open("rb") as probe:
        start = probe.read(len(GZIP_MAGIC))
    if start == GZIP_MAGIC:
        return gzip.open(file, "rb")  # type: ignore[return-value]
    if file.suffix == ".gz" and start:
        raise DataError(f"{file} is named .gz but holds no gzip; fetch it again, or rename it if it is plain text")
    return file.open("rb")


def _decode(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 (byte {line[error.start]:#04x} at position {error.start + 1}); "
            "convert the file to UTF-8"
        ) from error


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not valid JSON: {error.msg} at column {error.colno}") from error
    except (RecursionError, ValueError) as error:  # nested too deeply; an integer of too many digits
        raise DataError(f"{where} is not usable JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f'{where} is {_kind(row)}; each row must be a JSON object such as {{"question": ...}}')
    return row


def text_fields(row: Mapping[str, Any], where: str, names: tuple[str, ...]) -> list[str]:
    """Return the values of the named fields.

    Raises:
        DataError: if one is missing or not a string; the fields found are listed.
    """
    missing = [name for name in names if name not in row]
    if missing:
        found = ", ".join(map(repr, row)) or "none"
        raise DataError(
            f"{where} lacks {' and '.join(map(repr, missing))}; expected the fields "
            f"{' and '.join(map(repr, names))}, found {found}"
        )
    for name in names:
        if not isinstance(row[name], str):
            raise DataError(f"{where}: field {name!r} must be a string, but is {_kind(row[name])}")
    return [row[name] for name in names]


def number_field(row: Mapping[str, Any], where: str, name: str, *, default: float) -> float:
    """Return the value of a field that may be absent or null: a finite number, at least 0.

    Raises:
        DataError: if it is something else.
    """
    value = row.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{where}: field {name!r} must be a number, but is {_kind(value)}")
    if not 0 <= value < math.inf:
        raise DataError(f"{where}: field {name!r} must be finite and at least 0, but is {value}")
    return float(value)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return kinds.get(type(value), "an object")

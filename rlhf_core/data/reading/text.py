"""Lines of a file, plain or gzip, as UTF-8: what is damaged or otherwise encoded is named by its row."""

from __future__ import annotations

import gzip
import zlib
from typing import TYPE_CHECKING, BinaryIO

from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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

"""What format a file has, by its name and its first bytes."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from rlhf_core.data.reading.csv_rows import csv_rows
from rlhf_core.data.reading.json_rows import json_array, json_lines
from rlhf_core.data.reading.parquet_rows import parquet_rows
from rlhf_core.data.reading.text import BYTE_ORDER_MARK, opened
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from rlhf_core.data.reading.rows import Scan

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

"""Rows of Parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.data.reading.rows import Row, Scan
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

_BATCH_ROWS = 1024


def parquet_rows(file: Path, name: str) -> Scan:
    """Yield the rows of a Parquet file.

    Raises:
        DataError: if it is damaged, or empty.
    """
    import pyarrow as pa  # noqa: PLC0415  # slow to import, and many never read Parquet
    from pyarrow import parquet  # noqa: PLC0415

    number = 0
    try:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=_BATCH_ROWS):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(f"row {number} of {name}", fields)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} holds a text after row {number} that is not UTF-8 (byte {error.object[error.start]:#04x} at "
            f"position {error.start + 1}); write it again as UTF-8"
        ) from error
    except (pa.ArrowException, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{name} is damaged: it cannot be read as Parquet ({reason}); fetch it again") from error
    if not number:
        raise DataError(f"{name} is empty: its table holds no row")

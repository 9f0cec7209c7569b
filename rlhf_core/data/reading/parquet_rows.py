"""Rows of Parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.data.reading.rows import Row, Scan, as_written
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import pyarrow as pa

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

"""Datasets of the Hugging Face hub, and those on this machine that are laid out as datasets are."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from rlhf_core.data.reading.formats import Part
from rlhf_core.data.reading.local import is_data_name
from rlhf_core.data.reading.rows import Row, Scan, as_written
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from rlhf_core.config.data import SourceConfig

_SAVED = ("state.json", "dataset_dict.json")
_LONGEST_REASON = 300
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w][\w.-]*")


def is_hub_name(path: str) -> bool:
    """Return whether a path that is no file here may be a dataset's name: `owner/name`, without a file's suffix."""
    return _HUB_NAME.fullmatch(path) is not None and not is_data_name(path)


def is_saved(directory: Path) -> bool:
    """Return whether `save_to_disk` wrote a directory."""
    return any((directory / name).is_file() for name in _SAVED)


def is_dataset(directory: Path) -> bool:
    """Return whether a directory is laid out as a hub dataset: with a card, or data files only further down."""
    card = directory / "README.md"
    if card.is_file() and card.read_bytes().startswith(b"---"):
        return True
    if any(is_data_name(entry.name) for entry in directory.iterdir()):
        return False
    return any(is_data_name(entry.name) for entry in directory.glob("*/*"))


def saved_part(directory: Path, split: str = "train") -> Part:
    """Return the rows that `save_to_disk` wrote."""
    return Part(str(directory), "dataset on disk", partial(saved_rows, directory, split))


def saved_rows(directory: Path, split: str = "train") -> Scan:
    """Yield the rows of a dataset that `save_to_disk` wrote.

    Raises:
        DataError: if it is damaged or empty, or has splits, but not this one.
    """
    from datasets import DatasetDict, load_from_disk  # noqa: PLC0415  # slow to import, and seldom needed

    try:
        found = load_from_disk(str(directory))
    except Exception as error:  # whatever Arrow, JSON or the file system raise on damaged files
        raise DataError(f"dataset {directory} cannot be loaded: {_reason(error)}") from error
    if isinstance(found, DatasetDict):
        if split not in found:
            raise DataError(
                f"dataset {directory} has the splits {', '.join(found)}; give the directory of one of them, "
                f"for there is no {split!r}"
            )
        found = found[split]
    yield from _rows(found, str(directory))


def dataset_part(source: SourceConfig, *, cache_dir: Path | None = None) -> Part:
    """Return the rows of a split of a dataset: by hub name, or of a directory laid out as one.

    Args:
        source: its path, subset, split and revision.
        cache_dir: where `datasets` keeps what it makes of the files; None keeps it where it keeps everything.
    """
    name = source.path + (f" ({source.subset})" if source.subset else "") + f", split {source.split}"
    return Part(name, "dataset", partial(_dataset_rows, source, cache_dir, name))


def _dataset_rows(source: SourceConfig, cache_dir: Path | None, name: str) -> Scan:
    from datasets import load_dataset  # noqa: PLC0415  # slow to import, and seldom needed

    try:
        found = load_dataset(
            str(Path(source.path).expanduser()) if cache_dir else source.path,
            name=source.subset,
            split=source.split,
            revision=source.revision,
            cache_dir=None if cache_dir is None else str(cache_dir),
        )
    except Exception as error:  # the hub's, the network's, Arrow's, and the files' own
        raise DataError(_refusal(source, error, local=cache_dir is not None)) from error
    yield from _rows(found, name)


def _refusal(source: SourceConfig, error: Exception, *, local: bool) -> str:
    reason = _reason(error).rstrip(".")
    if local:
        return f"dataset {source.path} cannot be loaded: {reason}"
    return (
        f"{source.path!r} is no file or directory here, and as a dataset of the hub it cannot be loaded: {reason}; "
        "correct the path, or check name, subset, split, revision and the network"
    )


def _rows(found: Any, name: str) -> Scan:
    import numpy as np  # noqa: PLC0415  # as `datasets`
    from datasets import Value  # noqa: PLC0415  # slow to import, and seldom needed

    if not len(found):
        raise DataError(f"dataset {name} is empty")
    plain = found.with_format(None)  # not as arrays, and with all columns
    types = {"float16": np.float16, "float32": np.float32}
    short = {
        column: types[feature.dtype]
        for column, feature in plain.features.items()
        if isinstance(feature, Value) and feature.dtype in types
    }
    number = 0
    try:
        for number, row in enumerate(plain, start=1):
            yield Row(f"row {number} of {name}", as_written(row, short))
    except Exception as error:  # whatever Arrow and the decoding of its values raise on damaged files
        raise DataError(f"dataset {name} cannot be read after row {number}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Return in one line what lies behind an error: `datasets` wraps whatever a file or the network says."""
    while error.__cause__ is not None and "error occurred" in str(error):
        error = error.__cause__
    said = str(error).partition("Example of usage")[0]
    return shorten(said, _LONGEST_REASON, placeholder="...") or type(error).__name__

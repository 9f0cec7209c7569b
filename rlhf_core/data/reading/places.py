"""Where the rows of a source are: here, in a bucket, or on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.data.reading.formats import Part, part_of_file
from rlhf_core.data.reading.hub import dataset_part, is_dataset, is_hub_name, is_saved, saved_part
from rlhf_core.data.reading.local import files_of_directory, files_of_pattern, is_pattern, missing
from rlhf_core.data.reading.s3 import PREFIX, fetch_objects
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from rlhf_core.config.data import SourceConfig
    from rlhf_core.data.reading.results import Access


def find_parts(source: SourceConfig, access: Access) -> list[Part]:
    """Return what a source's path names, in order.

    What exists here is taken for what it is. Else a path is a pattern if it has `*`, `?` or `[`, and a hub
    dataset if it is `owner/name` without a data file's suffix.

    Raises:
        DataError: if nothing is there, or it cannot be reached.
    """
    path = source.path
    if path.startswith(PREFIX):
        return [part_of_file(file, address) for address, file in fetch_objects(path, access)]
    if "://" in path:
        raise DataError(f"{path} is of a kind that is not read; give a path, an s3:// address, or a hub name")
    try:
        return _parts_here(source, access)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _parts_here(source: SourceConfig, access: Access) -> list[Part]:
    path, here = source.path, Path(source.path).expanduser()
    if here.is_dir():
        return _parts_of_directory(here, source, access)
    if here.exists():
        return [part_of_file(here)]
    if is_pattern(path):
        return [part_of_file(file) for file in files_of_pattern(path)]
    if is_hub_name(path):
        return [dataset_part(source)]
    raise DataError(missing(here))


def _parts_of_directory(directory: Path, source: SourceConfig, access: Access) -> list[Part]:
    if is_saved(directory):
        return [saved_part(directory, source.split)]
    if is_dataset(directory):
        return [dataset_part(source, cache_dir=access.cache_dir / "datasets")]
    return [part_of_file(file) for file in files_of_directory(directory, source.split)]

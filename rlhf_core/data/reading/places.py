"""Where the rows of a source are: in files here, in objects of a bucket, or in a dataset, here or on the hub.

Objects of `s3://` are fetched once, and kept for as long as they do not change.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
import re
import tempfile
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rlhf_core.data.reading.formats import Part, part_of_file
from rlhf_core.data.reading.rows import Row, Scan, as_written
from rlhf_core.errors import DataAwayError, DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rlhf_core.config.data import SourceConfig

PREFIX = "s3://"
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".jsonl.gz", ".json.gz", ".csv.gz", ".tsv.gz")
"""Names of data files end so."""
_SPLITS = {"train": "train", "test": "test", "validation": "validation", "valid": "validation", "val": "validation"}
_SAVED = ("state.json", "dataset_dict.json")
_LONGEST_REASON = 300
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w][\w.-]*")
T = TypeVar("T")


class Access(NamedTuple):
    """Where objects of `s3://` are kept, and how they are reached."""

    cache_dir: Path
    storage_options: Callable[[], Mapping[str, Any]] = dict
    """Returns the options of fsspec's S3 file system; called where an address of `s3://` is read, and nowhere else."""


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


def is_data_name(name: str) -> bool:
    """Return whether a file is called as data files are."""
    return name.lower().endswith(SUFFIXES)


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
    raise DataError(missing(file))


def missing(file: Path) -> str:
    """Return the sentence on a file that is not there: whose link leads nowhere, else the nearest name beside it."""
    link = next((path for path in (file, *file.parents) if path.is_symlink() and not path.exists()), None)
    if link is not None:
        what = "is" if link == file else f"is under {link},"
        return f"data file {file} {what} a link that leads nowhere: there is no {link.readlink()}; correct the link"
    if not file.parent.is_dir():
        return f"data file {file} does not exist, nor does its directory {file.parent}"
    names = sorted(entry.name for entry in file.parent.iterdir())
    near = difflib.get_close_matches(file.name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {file.parent / near[0]}?" if near else f"; {file.parent} holds {listed(names)}"
    return f"data file {file} does not exist{hint}"


def listed(names: list[str], most: int = 5) -> str:
    """Return the first of some names, and how many more there are."""
    if not names:
        return "nothing"
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def files_of_directory(directory: Path, split: str) -> list[Path]:
    """Return the data files of a directory, sorted; those of the split only where their names tell splits.

    Raises:
        DataError: if there are none.
    """
    files = _present(entry for entry in directory.iterdir() if is_data_name(entry.name))
    if not files:
        names = sorted(entry.name for entry in directory.iterdir())
        raise DataError(f"{directory} holds no data file ({', '.join(SUFFIXES[:5])}; also .gz), but {listed(names)}")
    return of_split(files, split, str(directory))


def _present(paths: Iterable[Path]) -> list[Path]:
    """Return those that are files, sorted.

    Raises:
        DataError: if one is a link that leads nowhere: its rows would be missed.
    """
    found = sorted(paths)
    shown = (path for path in found if not path.name.startswith("."))  # an editor's lock is such a link
    dangling = next((path for path in shown if path.is_symlink() and not path.exists()), None)
    if dangling is not None:
        raise DataError(missing(dangling))
    return [path for path in found if path.is_file()]


def of_split(files: list[Path], split: str, name: str) -> list[Path]:
    """Return the files of a split, if any file is named for one; else all.

    Otherwise the test set of a directory with train.jsonl and test.jsonl would be learnt.

    Raises:
        DataError: if files are named for other splits only.
    """
    named = {file: split_of for file in files if (split_of := _split_of(file.name))}
    if not named:
        return files
    chosen = [file for file in files if named.get(file) == _SPLITS.get(split, split)]
    if not chosen:
        splits = ", ".join(sorted(set(named.values())))
        raise DataError(
            f"the files of {name} are of the splits {splits}, and none of {split!r}; set the source's split, or give "
            "one of the files"
        )
    return chosen


def _split_of(name: str) -> str | None:
    words = re.split(r"[^a-z]+", name.lower())
    return next((_SPLITS[word] for word in words if word in _SPLITS), None)


def is_pattern(path: str) -> bool:
    """Return whether a path is a pattern (`*`, `?`, `[...]`, and `**` for directories at any depth)."""
    return glob.has_magic(path)


def files_of_pattern(pattern: str) -> list[Path]:
    """Return the files that a pattern names, sorted.

    Raises:
        DataError: if there are none.
    """
    found = sorted(path for each in glob.glob(str(Path(pattern).expanduser()), recursive=True) if (path := Path(each)))
    files = _present(found)
    if files:
        return files
    if found:
        raise DataError(f"{pattern} names directories only, such as {found[0]}; add /* to name the files in them")
    root = next(parent for parent in Path(pattern).expanduser().parents if not is_pattern(str(parent)))
    names = sorted(entry.name for entry in root.iterdir()) if root.is_dir() else []
    holds = f"{root} holds {listed(names)}" if root.is_dir() else f"{root} does not exist"
    raise DataError(f"no file matches {pattern}; {holds}")


class RemoteObject(NamedTuple):
    """An object of a bucket, as it is listed."""

    address: str
    size: int
    """In bytes."""
    tag: str
    """What changes when the object does."""
    when: datetime | None
    """When it was written; None if the server does not tell."""
    fetch: Callable[[], Path]
    """Returns the file that holds it here; an object that was fetched before, and has not changed, is not again."""


def fetch_objects(address: str, access: Access) -> list[tuple[str, Path]]:
    """Return what an address names, sorted: each object's address, and the file that holds it here.

    Arguments and errors as of `list_objects`.
    """
    found = list_objects(address, access)
    if found:
        return [(each.address, each.fetch()) for each in found]
    if is_pattern(address):
        raise DataError(f"no object matches {address}; check the bucket and the pattern")
    raise DataError(f"there is no data file under {address}, but {listed(_others(address, access))}")


def list_objects(address: str, access: Access) -> list[RemoteObject]:
    """Return what an address names, sorted; nothing is fetched.

    Args:
        address: an object, a pattern, or a prefix that ends in `/` for the data files right under it.
        access: where objects are kept, and how the server is reached.

    Raises:
        DataError: if nothing is there, or the server cannot be reached, refuses, or breaks off.
    """
    bucket = address.removeprefix(PREFIX).partition("/")[0]
    if not bucket or is_pattern(bucket):
        raise DataError(f"{address} names no bucket; write {PREFIX}bucket/path/to/file")
    options = access.storage_options()
    files, origin = _file_system(options, address), str(options.get("endpoint_url", ""))
    kept = access.cache_dir / "s3"
    return [
        RemoteObject(
            name,
            int(info.get("size") or 0),
            _version(info),
            info.get("LastModified"),
            partial(_fetched, name, files, kept, origin),
        )
        for name, info in sorted(_infos(address, files).items())
    ]


def _file_system(given: Mapping[str, Any], address: str) -> Any:
    import fsspec  # noqa: PLC0415  # slow to import, and seldom needed

    options = {"use_listings_cache": False, "skip_instance_cache": True, **given}
    return _asked(address, lambda: fsspec.filesystem("s3", **options))


def _infos(address: str, files: Any) -> dict[str, dict[str, Any]]:
    """Return what the server says of each object that an address names."""
    if is_pattern(address):
        found = _asked(address, partial(files.glob, address, detail=True))
        return {PREFIX + name: info for name, info in found.items() if info.get("type") == "file"}
    if address.endswith("/"):
        entries = _asked(address, partial(_listing, address, files))
        return {PREFIX + each["name"]: each for each in entries if is_data_name(each["name"])}
    return {address: _asked(address, partial(files.info, address))}


def _listing(prefix: str, files: Any) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = files.ls(prefix, detail=True)
    except FileNotFoundError:
        files.info(prefix.removeprefix(PREFIX).partition("/")[0])  # where the bucket is missing, it is an error
        return []
    return found


def _others(address: str, access: Access) -> list[str]:
    files = _file_system(access.storage_options(), address)
    return sorted(_asked(address, partial(files.ls, address, detail=False)))


def _fetched(address: str, files: Any, cache_dir: Path, origin: str) -> Path:
    info = _asked(address, partial(files.info, address))
    if info.get("type") != "file":
        raise DataError(f"{address} is no object but a prefix; end it in / to read the data files under it")
    version = _version(info)
    folder = cache_dir / _short(f"{origin}\0{address}\0{version}")
    kept = folder / address.rpartition("/")[2]
    if kept.is_file() and kept.stat().st_size == info["size"]:
        return kept
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, prefix=".fetching-")
    os.close(handle)
    part = Path(name)
    try:
        _asked(address, partial(files.get_file, address, name))
        whole = (
            part.stat().st_size == info["size"] and _version(_asked(address, partial(files.info, address))) == version
        )
        if not whole:
            raise DataError(f"{address} changed while it was fetched, or the connection broke off; run it again")
        part.replace(kept)
    finally:
        part.unlink(missing_ok=True)
    return kept


def _version(info: dict[str, Any]) -> str:
    """Return what changes when the object does: its tag, else when it was written, with its size."""
    return f"{info.get('ETag') or info.get('LastModified')}\0{info.get('size')}"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _asked(address: str, request: Callable[[], T]) -> T:
    from aiohttp import ClientError as ConnectionFault  # noqa: PLC0415  # as slow to import as fsspec's S3
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, NoCredentialsError  # noqa: PLC0415
    from botocore.exceptions import ConnectionError as BotoConnectionError  # noqa: PLC0415

    try:
        return request()
    except FileNotFoundError:
        reason = "there is no such object; check bucket and path"
    except PermissionError as error:
        reason = f"the server refuses ({_first_line(error)}); check the keys and what they permit"
    except NoCredentialsError:
        reason = "there are no keys for the server; set RLHF_S3_ACCESS_KEY and RLHF_S3_SECRET_KEY"
    except (BotoConnectionError, HTTPClientError, ConnectionFault, ConnectionError, TimeoutError) as error:
        reason = f"{_first_line(error)}; check that the server runs and that its address is right"
        raise DataAwayError(f"{address} cannot be fetched: {reason}") from None
    except (BotoCoreError, ClientError, OSError, ValueError) as error:
        reason = f"{_first_line(error)}; check that the server runs and that its address is right"
    raise DataError(f"{address} cannot be fetched: {reason}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


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

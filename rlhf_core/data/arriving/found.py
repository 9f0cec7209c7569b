"""What lies at a source now: its files with sizes and times, before any of them is read. Nothing of it is changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.data.preparing import role_of
from rlhf_core.data.reading.formats import Part, part_of_file
from rlhf_core.data.reading.places import (
    PREFIX,
    dataset_part,
    files_of_pattern,
    is_data_name,
    is_hub_name,
    is_pattern,
    is_saved,
    list_objects,
    missing,
    of_split,
    saved_part,
)
from rlhf_core.errors import DataAwayError, DataError

if TYPE_CHECKING:
    from rlhf_core.config import DataConfig, SourceConfig
    from rlhf_core.data.reading import Access, Role
    from rlhf_core.data.reading.places import RemoteObject

_PIECE = 1 << 20


@dataclass(frozen=True)
class FoundFile:
    """A file, an object, or a dataset that is read as one."""

    name: str
    """As messages call it."""
    size: int
    """In bytes; 0 of a hub dataset."""
    tag: str
    """What changes with the content, as a rule: an object's tag, a file's time of change, a commit."""
    arrived: datetime
    """When it was written."""
    digest: Callable[[], str]
    """Returns the SHA-256 of its content; raises DataError where it cannot be read."""
    part: Callable[[], Part]
    """Returns its rows, to be read; raises DataError where its format is unknown."""
    looked_at: Callable[[], tuple[int, str]] | None = None
    """Returns its size and tag anew; None of what cannot change while it is read."""

    def is_as_found(self) -> bool:
        """Return whether it has the size and tag with which it was found: nobody has written to it since."""
        return self.looked_at is None or self.looked_at() == (self.size, self.tag)


def files_of(source: SourceConfig, access: Access, until: datetime) -> list[FoundFile]:
    """Return what lies at a source, in order of names; nothing where nothing has arrived yet.

    A directory gives its data files at any depth, unless it is a dataset: with a card, or saved by `datasets`.

    Args:
        source: a directory, pattern, file, `s3://` address or hub name.
        access: how it is reached.
        until: of a hub dataset, the newest commit of this time or earlier is taken.

    Raises:
        DataError: if the directory, bucket or dataset itself is missing or cannot be reached.
    """
    path, here = source.path, Path(source.path).expanduser()
    if path.startswith(PREFIX):
        return [_object(each) for each in list_objects(path, access)]
    if "://" in path:
        raise DataError(f"{path} is of a kind that is not read; give a path, an s3:// address, or a hub name")
    try:
        if here.is_dir():
            return _in_directory(here, source, access)
        if here.exists():
            return [_file(here)]
        if is_pattern(path):
            return [_file(each) for each in _of_pattern(path)]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if is_hub_name(path):
        return _of_hub(source, until)
    raise DataError(missing(here))


def role_of_arrivals(source: SourceConfig, config: DataConfig, access: Access, until: datetime) -> Role | None:
    """Return the role of a source that grows, by the first of its files that can be read; None if there is no file.

    Raises:
        DataError: if there are files, and none can be read or has a known form.
    """
    first: DataError | None = None
    for found in files_of(source, access, until):
        try:
            return role_of(source, config, access, found.part())
        except DataAwayError:
            raise
        except DataError as error:
            first = first or error
    if first is not None:
        raise first
    return None


def _of_pattern(pattern: str) -> list[Path]:
    root = next(parent for parent in Path(pattern).expanduser().parents if not is_pattern(str(parent)))
    try:
        return files_of_pattern(pattern)
    except DataError:
        if root.is_dir():  # nothing has arrived yet
            return []
        raise


def _in_directory(directory: Path, source: SourceConfig, access: Access) -> list[FoundFile]:
    if is_saved(directory):
        return [_whole(directory, lambda: saved_part(directory, source.split))]
    card = directory / "README.md"
    if card.is_file() and card.read_bytes().startswith(b"---"):
        return [_whole(directory, lambda: dataset_part(source, cache_dir=access.cache_dir / "datasets"))]
    shown = (path for path in directory.rglob("*") if is_data_name(path.name) and not _is_hidden(path, directory))
    files = sorted(path for path in shown if path.is_file() or (path.is_symlink() and not path.exists()))
    return [_file(path) for path in (of_split(files, source.split, str(directory)) if files else [])]


def _is_hidden(path: Path, below: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(below).parts)


def _file(path: Path) -> FoundFile:
    size, tag = _state(path)
    written = path.stat() if path.exists() else path.lstat()  # of a link to nothing, the link's own time
    when = datetime.fromtimestamp(written.st_mtime, UTC)
    return FoundFile(
        str(path), size, tag, when, partial(_digest, [path]), partial(part_of_file, path), partial(_state, path)
    )


def _state(path: Path) -> tuple[int, str]:
    try:
        found = path.stat()
    except OSError:
        return 0, "gone"
    return found.st_size, str(found.st_mtime_ns)


def _whole(directory: Path, part: Callable[[], Part]) -> FoundFile:
    """Return a dataset of several files, which is read as one."""

    def files() -> list[Path]:
        return sorted(path for path in directory.rglob("*") if path.is_file() and not _is_hidden(path, directory))

    def state() -> tuple[int, str]:
        states = [_state(path) for path in files()]
        return sum(size for size, _ in states), _short(str(states))

    size, tag = state()
    written = max((path.stat().st_mtime for path in files()), default=0.0)
    when = datetime.fromtimestamp(written, UTC)
    return FoundFile(str(directory), size, tag, when, lambda: _digest(files()), part, state)


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        try:
            with file.open("rb") as stream:
                while piece := stream.read(_PIECE):
                    digest.update(piece)
        except FileNotFoundError:
            raise DataError(missing(file)) from None
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _object(found: RemoteObject) -> FoundFile:
    return FoundFile(
        found.address,
        found.size,
        found.tag,
        found.when or datetime.fromtimestamp(0, UTC),
        lambda: _digest([found.fetch()]),
        lambda: part_of_file(found.fetch(), found.address),
    )


def _of_hub(source: SourceConfig, until: datetime) -> list[FoundFile]:
    """Return the newest commit of a hub dataset that is not later than a time; a revision that is named stays."""
    from huggingface_hub import HfApi  # noqa: PLC0415  # slow to import, and seldom needed
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

    try:
        commits = HfApi().list_repo_commits(source.path, repo_type="dataset", revision=source.revision)
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DataError(
            f"{source.path!r} is no file or directory here, and as a dataset of the hub it cannot be asked for: "
            f"{reason}; correct the path, or check the network"
        ) from error
    commit = max((each for each in commits if each.created_at <= until), key=lambda c: c.created_at, default=None)
    if commit is None:
        return []
    at = source.model_copy(update={"revision": commit.commit_id})
    part = dataset_part(at)
    name = f"{part.name}, commit {commit.commit_id[:12]}"
    digest = _short(f"{part.name}\0{commit.commit_id}")
    return [FoundFile(name, 0, commit.commit_id, commit.created_at, lambda: digest, lambda: part)]


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

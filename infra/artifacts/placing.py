"""Putting files of the cache where they are wanted: as links, or as copies."""

from __future__ import annotations

import errno
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from infra.artifacts.download import READ_BYTES, STALL_S
from infra.artifacts.locks import own, try_own, unlock
from infra.artifacts.manifest import FileEntry
from infra.errors import StoreError

_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_PART = re.compile(r"\.[0-9a-f]{16}\.part")


def target_of(directory: Path, entry: FileEntry, uri: str) -> Path:
    """Return where a file of an artifact goes in a directory; its folder is made.

    Raises:
        StoreError: if that is not in the directory, for a link leads out of it.
    """
    target = directory / entry.path
    if not is_inside(target, directory):
        raise StoreError(f"{entry.path!r} of {uri} would be written outside of {directory}, through a link")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def is_inside(target: Path, directory: Path) -> bool:
    """Return whether a path leads to a place in a directory, whatever links there are."""
    return target.parent.resolve().is_relative_to(directory.resolve())


def part_of(target: Path, entry: FileEntry) -> Path:
    """Return what an unfinished file is called, in the directory where it will be."""
    return target.with_name(f".{entry.sha256[:16]}.part")


def is_part(path: Path) -> bool:
    """Return whether that is what an unfinished file is called."""
    return _PART.fullmatch(path.name) is not None


def discard_parts(directory: Path) -> None:
    """Remove what killed fetches have left in a directory; what another process is at stays."""
    for part in [path for path in directory.rglob(".*") if is_part(path)]:
        with suppress(PermissionError):  # another user's
            if (descriptor := try_own(part)) is not None:
                part.unlink()
                unlock(descriptor)


def put_link(kept: Path, target: Path, scratch: Path) -> bool:
    """Give a file another name, in place of what has it; return False where that cannot be.

    Args:
        kept: the file.
        target: its other name.
        scratch: a directory of ours on the file system of `kept`.
    """
    fresh = scratch / uuid4().hex
    try:
        os.link(kept, fresh)
        os.replace(fresh, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    finally:
        fresh.unlink(missing_ok=True)  # also when both were the same file already: the system then leaves both
    return True


def put_copy(kept: Path, target: Path, part: Path) -> None:
    """Copy a file; the copy may be written to.

    Args:
        kept: the file.
        target: where its copy goes.
        part: what the copy is called until it is whole.

    Raises:
        OSError: if it cannot be written; nothing of it stays then.
    """
    with own(part, STALL_S) as descriptor:
        try:
            os.ftruncate(descriptor, 0)
            with kept.open("rb") as source, open(descriptor, "wb", closefd=False) as copy:
                shutil.copyfileobj(source, copy, READ_BYTES)
            os.replace(part, target)
        except OSError:
            part.unlink(missing_ok=True)
            raise

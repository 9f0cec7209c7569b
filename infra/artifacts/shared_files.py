"""Files on this machine that several processes write: one process at a time owns a file, until it has its final name.

A process owns a file by a lock on its open descriptor. The system releases the lock when the process ends, so nobody
waits for the dead. A file is written under the name of its unfinished part and renamed when it is whole.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from infra.artifacts.manifest import FileEntry
from infra.errors import StoreError, StoreNotReadyError

STALL_S = 1200.0
"""How long another process that writes a file may be idle before we stop waiting for it: longer than it waits for the
store itself (RLHF_STORE_PATIENCE_S)."""
READ_BYTES = 1 << 20
_POLL_S = 0.02
_PART = re.compile(r"\.[0-9a-f]{16}\.part")
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


@contextmanager
def own(path: Path, patience_s: float, go_on: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Yield the descriptor of a file, made if need be, once it is locked for us alone.

    Args:
        path: the file; its owner may remove it or give it another name.
        patience_s: how long we wait for an owner who writes nothing to it.
        go_on: is called while we wait, and raises when waiting has become useless.

    Raises:
        StoreError: if its owner was idle for longer than that.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    seen: object = None
    deadline = time.monotonic() + patience_s
    while (descriptor := try_own(path)) is None:
        go_on()
        if (state := _state(path)) != seen:
            seen, deadline = state, time.monotonic() + patience_s
        elif time.monotonic() > deadline:
            raise StoreNotReadyError(
                f"another process has held {path} for {patience_s:.0f} s without writing to it; end it, and try again"
            )
        time.sleep(_POLL_S)
    try:
        yield descriptor
    finally:
        unlock(descriptor)


def try_own(path: Path) -> int | None:
    """Return the descriptor of the locked file, or None if another process has it or has just taken it away."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)  # a link leads to what is not ours
    try:
        if try_lock(descriptor) and _is_at(descriptor, path):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def try_lock(descriptor: int) -> bool:
    """Lock an open file unless another open file has the lock; return whether it is ours."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Release a lock and close its file; closing alone is not enough when a forked child has the file too."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _state(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is written to or replaced."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_blocks


def target_of(directory: Path, entry: FileEntry, uri: str) -> Path:
    """Return where a file of an artifact goes in a directory; its folder is made.

    Raises:
        StoreError: if that is not in the directory, because a link leads out of it.
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
    """Return the name of an unfinished file, in the directory where it will be."""
    return target.with_name(f".{entry.sha256[:16]}.part")


def is_part(path: Path) -> bool:
    """Return whether a path has the name of an unfinished file."""
    return _PART.fullmatch(path.name) is not None


def discard_parts(directory: Path) -> None:
    """Remove the unfinished files of killed fetches from a directory; those that another process writes stay."""
    for part in [path for path in directory.rglob(".*") if is_part(path)]:
        with suppress(PermissionError):  # another user's
            if (descriptor := try_own(part)) is not None:
                part.unlink()
                unlock(descriptor)


def put_link(kept: Path, target: Path, scratch: Path) -> bool:
    """Give a file another name, in place of what has that name; return False where the system has no such links.

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
        part: the name of the copy until it is whole.

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

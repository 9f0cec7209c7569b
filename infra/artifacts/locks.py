"""Locks on files of this machine: an open file holds one, and the system lets go when its process ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.errors import StoreNotReadyError

POLL_S = 0.02


def try_lock(descriptor: int) -> bool:
    """Lock an open file unless another open file has the lock; return whether it is ours."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Let go of a lock and close its file; closing alone would not do where a forked child has the file too."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


@contextmanager
def own(path: Path, patience_s: float, go_on: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Yield the descriptor of a file, made if need be, once it is locked for us alone.

    Args:
        path: the file; whoever has it may remove it or give it another name.
        patience_s: how long we wait for an owner who writes nothing to it.
        go_on: is called while we wait, and raises when that has become useless.

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
        time.sleep(POLL_S)
    try:
        yield descriptor
    finally:
        unlock(descriptor)


def try_own(path: Path) -> int | None:
    """Return the descriptor of the locked file, or None if another has it or has just taken it away."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)  # a link leads to what is not ours
    try:
        if try_lock(descriptor) and _is_at(descriptor, path):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


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

"""Buckets in memory that the processes of a node share: files that have no name, and so cannot be left behind.

`memfd_create` makes memory that is there as long as a process has it open. Makers open it by way of the trainer's own
descriptor in /proc. Whoever is killed, at whatever moment: the last one to go takes the memory along. Nothing has
to be swept up, and the size of /dev/shm, which containers keep small, is no limit.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_core.weights.buckets import Publication, Received, WeightsError

_PAGE = mmap.PAGESIZE
_SPARE = 2
"""Files that are kept for later: one, and another for a maker that is a version behind."""


@dataclass(frozen=True, slots=True)
class SharedMemoryPlace:
    """A shared file, as another process of the node finds it."""

    pid: int
    """Who has it open: the trainer."""
    descriptor: int
    """In that process."""
    label: str
    """What the file must be called there: process ids and descriptors are used again."""
    offsets: tuple[int, ...]
    """First byte of each bucket."""


def has_shared_memory() -> bool:
    """Return whether this system has such files."""
    return hasattr(os, "memfd_create")


class SharedFile:
    """One shared file: holds the buckets of one publication, and of a later one once nobody needs the first.

    Pages that were written before are written again several times as fast as new ones.

    Args:
        label: of this file alone.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._descriptor = os.memfd_create(label)  # closed in children that execute another program
        self._map: mmap.mmap | None = None
        self._size = 0
        self._written = 0
        self._offsets: list[int] = []
        self._end = 0

    def begin(self) -> bool:
        """Start again at the first byte; return whether that can be: not while a maker reads or has weights here."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._offsets, self._end = [], 0
        return True

    def open(self, size: int) -> Tensor:
        """Return room for a bucket."""
        start = -(-self._end // _PAGE) * _PAGE
        if start + size > self._size or self._map is None:
            self._size = max(start + size, 2 * self._size)  # a page that is never written takes no memory
            os.ftruncate(self._descriptor, self._size)
            self._map = mmap.mmap(self._descriptor, self._size)
        self._offsets.append(start)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=start)

    def close(self, filled: int) -> None:
        """Keep the first bytes of the bucket that was opened last."""
        self._end = self._offsets[-1] + filled
        self._written = max(self._written, self._end)

    def place(self) -> SharedMemoryPlace:
        """Return where the buckets are; from now on they can be read."""
        if self._end < self._written // 2:  # adapters, where a whole model was: its memory is given back
            os.ftruncate(self._descriptor, self._end)
            self._map, self._size, self._written = None, self._end, self._end
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return self.where()

    def where(self) -> SharedMemoryPlace:
        """Return where the buckets are that were opened."""
        return SharedMemoryPlace(os.getpid(), self._descriptor, self._label, tuple(self._offsets))

    def release(self) -> None:
        """Close the file: its memory is free once no maker has it open."""
        self._map = None
        os.close(self._descriptor)


def opened_for_writing(place: SharedMemoryPlace, sizes: Sequence[int]) -> list[Tensor]:
    """Return the buckets of another process's file, for whoever writes them together with it.

    Raises:
        OSError: if it is not on this machine.
    """
    descriptor = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    try:
        _check_label(descriptor, place)
        shared = mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
    return [
        torch.frombuffer(shared, dtype=torch.uint8, count=size, offset=offset)
        if size else torch.empty(0, dtype=torch.uint8)
        for offset, size in zip(place.offsets, sizes, strict=True)
    ]  # fmt: skip


def _check_label(descriptor: int, place: SharedMemoryPlace) -> None:
    """Check that a file is the one that is meant.

    Raises:
        FileNotFoundError: if it is not.
    """
    label = os.readlink(f"/proc/self/fd/{descriptor}")
    if label != f"/memfd:{place.label} (deleted)":
        raise FileNotFoundError(f"process {place.pid} has {label} where {place.label} was")


class SharedMemorySender:
    """The trainer's end: the shared files of a publisher, those that are free among them.

    Args:
        incarnation: of the publisher.
    """

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._count = 0
        self._free: list[SharedFile] = []

    def begin(self) -> SharedFile:
        """Return a file that no maker needs."""
        for file in self._free:
            if file.begin():
                self._free.remove(file)
                return file
        self._count += 1
        file = SharedFile(f"rlhf-weights-{self._incarnation}-{self._count}")
        file.begin()
        return file

    def free(self, file: SharedFile) -> None:
        """Keep a file for a later publication, once no maker has weights there any more; close the oldest."""
        self._free.append(file)
        for former in self._free[:-_SPARE]:
            former.release()
        self._free = self._free[-_SPARE:]

    def close(self) -> None:
        """Close the files that are free."""
        for file in self._free:
            file.release()
        self._free = []


class _AttachedFile:
    """A shared file as a maker sees it; its memory stays as long as this object or a tensor in it.

    What a maker writes there, it writes on pages of its own.
    """

    def __init__(self, place: SharedMemoryPlace, size: int) -> None:
        self.descriptor = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        # The map has a descriptor of its own for what was opened here: a lock goes with the last tensor, not before.
        weakref.finalize(self, os.close, self.descriptor)
        _check_label(self.descriptor, place)
        self.mapped = size
        self._map = mmap.mmap(self.descriptor, size, access=mmap.ACCESS_COPY)

    def read(self, offset: int, size: int) -> Tensor:
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(memoryview(self._map)[offset : offset + size], dtype=torch.uint8)

    def lock(self, needed: int) -> None:
        """Keep the trainer from writing.

        Raises:
            BlockingIOError: if it writes.
            ValueError: if the file has become shorter than what is needed.
        """
        fcntl.flock(self.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if (size := os.fstat(self.descriptor).st_size) < needed:
            self.unlock()
            raise ValueError(f"the file has {size} bytes, not {needed}")

    def unlock(self) -> None:
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)


class SharedMemoryReceiver:
    """A maker's end: has the files of the last two publications attached, as publishers use two in turn.

    Its models can use the memory itself, instead of copies: all makers of a node share it.
    """

    def __init__(self) -> None:
        self._attached: dict[str, _AttachedFile] = {}
        self._in_use: _AttachedFile | None = None
        """The file that weights are in."""

    @contextmanager
    def buckets(self, publication: Publication, timeout_s: float) -> Iterator[Received]:  # noqa: ARG002
        """Yield the buckets, which the trainer does not write while the block runs, nor after it if they are kept.

        Raises:
            WeightsError: if they are there no more.
        """
        place: SharedMemoryPlace = publication.place
        placed = list(zip(place.offsets, publication.buckets, strict=True))
        needed = max((offset + bucket.size for offset, bucket in placed), default=0)
        gone = WeightsError(
            f"weights of version {publication.version} are not in this machine's memory any more: process {place.pid}, "
            "which published them, has ended or has gone on; take what the trainer publishes next"
        )
        try:
            attached = self._attach(place, needed)
            attached.lock(needed)
        except (OSError, ValueError) as error:  # not there; shorter than it should be; being written again
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                raise
            raise gone from error
        try:
            bodies = [attached.read(offset, bucket.size) for offset, bucket in placed]
            yield Received(bodies, lambda: self._use(attached))
        except BaseException:
            self._attached.pop(place.label, None)  # should a page of it have been written here, it is not met again
            raise
        finally:
            if attached is not self._in_use:
                attached.unlock()

    def release(self) -> None:
        """Take note that no weight is in these files any more: the trainer may write all of them."""
        if self._in_use is not None:
            self._in_use.unlock()
        self._in_use = None

    def close(self) -> None:
        """Close all files; the one that weights are in stays as long as they do."""
        self._in_use = None
        self._attached.clear()

    def _use(self, attached: _AttachedFile) -> None:
        """Take note that weights are in that file from now on, and none in the former one."""
        former, self._in_use = self._in_use, attached
        if former is not None and former is not attached:
            former.unlock()

    def _attach(self, place: SharedMemoryPlace, needed: int) -> _AttachedFile:
        attached = self._attached.pop(place.label, None)
        if attached is None or attached.mapped < needed:  # it has grown
            attached = _AttachedFile(place, needed)
        publisher = _publisher(place.label)
        kept = [label for label in self._attached if _publisher(label) == publisher][-1:]
        self._attached = {label: self._attached[label] for label in kept} | {place.label: attached}
        return attached


def _publisher(label: str) -> str:
    """Return the part of a label that all files of a publisher have in common."""
    return label.rpartition("-")[0]

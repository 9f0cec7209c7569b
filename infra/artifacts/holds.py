"""Who uses what of the local cache: written in a locked file, so that the system takes it back with the process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Lock
from uuid import uuid4

from infra.artifacts.locks import try_lock, unlock

HOLDS = "holds"
_NAMES = "names"


class Hold:
    """What a living process uses; nobody evicts it. It ends with `end`, or with the last process that has it open."""

    def __init__(self, root: Path, names: Iterable[str]) -> None:
        """Begin to hold; whoever evicts must be kept away meanwhile.

        Args:
            root: of the cache.
            names: hashes of files, digests of artifacts.
        """
        self.scratch = root / HOLDS / uuid4().hex
        """A directory on the cache's file system for what is being made; it goes when the hold ends."""
        self.scratch.mkdir(parents=True)
        self._descriptor = os.open(self.scratch / _NAMES, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._names: set[str] = set()
        try:
            try_lock(self._descriptor)  # nobody else knows of it yet
            self.add(names)
        except BaseException:
            self.end()
            raise

    def add(self, names: Iterable[str]) -> None:
        """Hold these too; whoever evicts must be kept away meanwhile."""
        more = set(names) - self._names
        data = "".join(f"\n{name}" for name in sorted(more)).encode()
        while data:
            data = data[os.write(self._descriptor, data) :]
        self._names |= more

    def has(self, names: Iterable[str]) -> bool:
        """Return whether all of these are held, and nobody has removed the file in which that stands."""
        return self._names.issuperset(names) and (self.scratch / _NAMES).exists()

    def end(self) -> None:
        """Let go."""
        unlock(self._descriptor)
        shutil.rmtree(self.scratch, ignore_errors=True)


class LifelongHolds:
    """The holds that last as long as this process, one for each cache."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._holds: dict[Path, Hold] = {}
        os.register_at_fork(after_in_child=self._start_anew)

    def hold(self, root: Path, names: Iterable[str], begin: Callable[[Callable[[], Hold]], Hold]) -> Hold:
        """Hold these until the process ends.

        Args:
            root: of the cache.
            names: hashes of files, digests of artifacts.
            begin: calls what it is given while nobody evicts.
        """
        names = set(names)
        with self._lock:
            known = self._holds.get(root)
            if known is not None and known.has(names):
                return known
            self._holds[root] = begin(lambda: _extended(known, root, names))
            return self._holds[root]

    def _start_anew(self) -> None:
        """Leave the parent's holds to the parent: a child has its own, and keeps the parent's open besides."""
        self._lock = Lock()
        self._holds = {}


def _extended(known: Hold | None, root: Path, names: set[str]) -> Hold:
    if known is not None and not known.has(()):  # somebody has cleared the cache
        known.end()
        known = None
    if known is None:
        return Hold(root, names)
    known.add(names)
    return known


def names_in_use(root: Path) -> set[str]:
    """Return what living processes hold; what the dead have left is removed.

    Raises:
        OSError: if it cannot be told whether somebody is living: what he holds must not be taken for nobody's.
    """
    names: set[str] = set()
    for folder in (root / HOLDS).glob("*"):
        held = _names_of_living(folder / _NAMES)
        if held is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            names |= held
    return names


def _names_of_living(path: Path) -> set[str] | None:
    """Return what stands in a hold's file, or None if no process has it."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with open(descriptor, encoding="ascii") as file:
        return None if try_lock(descriptor) else set(file.read().split())

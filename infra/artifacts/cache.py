"""The local cache of fetched artifacts, shared by all processes of this machine, and kept within its limit.

Its unit is the file, under its SHA-256 and read-only. An artifact's directory is made of links to its files. The cache
does not trust what it holds: every byte is hashed whenever it is asked for, and what is wrong is fetched again.

What was used least recently is removed first; what is in use is never removed. A process writes what it uses in a
locked file, and the system releases the lock when the process ends.

    files/ab/cdef...    whole files           <digest>/       artifacts' directories
    parts/abcdef...     unfinished ones       holds/<id>/     what living processes use
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TypeVar
from uuid import uuid4

from infra.artifacts.backend import Backend, in_parallel
from infra.artifacts.download import MISSING, Downloads, Wanted, filling, flaw
from infra.artifacts.manifest import FileEntry, Manifest
from infra.artifacts.shared_files import own, part_of, put_copy, put_link, target_of, try_lock, unlock
from infra.errors import StoreError

PINS = "holds"
"""Name of their directory, which earlier releases that share the cache know by it."""
_NAMES = "names"
FILES, PARTS = "files", "parts"
_TREE = re.compile(r"[0-9a-f]{64}")
_BLOCK_BYTES = 512
T = TypeVar("T")
log = logging.getLogger(__name__)
LIMIT_GB = 50.0
GB = 10**9
COPIED_BYTES = 10**6
"""Files of at most this size are copied for their user, who may edit them: configurations, tokenizers."""
LOCK_PATIENCE_S = 120.0
"""How long we wait for a process that evicts: it lists the cache and removes files."""


class Cache:
    """Checked files by their hash, for several threads and processes at once."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        """Describe a cache; nothing is made before it is used.

        Args:
            root: its directory.
            limit_bytes: what it may hold after a fetch, besides what is in use.
        """
        self._root = root.absolute()
        self._limit_bytes = limit_bytes

    def path(self, entry: FileEntry) -> Path:
        """Return where a file is when it is kept."""
        return self._root / FILES / entry.sha256[:2] / entry.sha256[2:]

    def has(self, path: Path, entry: FileEntry) -> bool:
        """Return whether a path is another name of a file that is kept."""
        try:
            return os.path.samestat(self.path(entry).stat(), path.lstat())
        except FileNotFoundError:
            return False

    def directory(self, backend: Backend, manifest: Manifest) -> Path:
        """Return a directory with an artifact's files, which nobody evicts while this process lives.

        Raises:
            StoreError: if a blob is not what it should be, or the cache cannot be written.
        """
        with self._explained(manifest):
            pin = _lifelong.pin(self._root, _names(manifest), self._while_nobody_evicts)
            renewed = self.keep(backend, manifest)
            directory = self._directory(manifest, pin.scratch, renewed)
        if renewed:
            self._tidy()
        return directory

    def fetch(self, backend: Backend, manifest: Manifest, directory: Path) -> Path:
        """Give a directory an artifact's files: links to those of the cache, or copies of the small ones.

        Raises:
            StoreError: as `fetch_directly`.
        """
        with filling(directory, manifest, is_mended=self.has) as lacking:
            needed = manifest.model_copy(update={"files": tuple(lacking)})
            with self.pinning(backend, needed) as scratch:

                def put(entry: FileEntry) -> None:
                    kept, target = self.path(entry), target_of(directory, entry, manifest.uri)
                    if entry.size <= COPIED_BYTES or not put_link(kept, target, scratch):
                        put_copy(kept, target, part_of(target, entry))

                in_parallel(put, lacking)
        return directory

    @contextmanager
    def pinning(self, backend: Backend, manifest: Manifest) -> Iterator[Path]:
        """Keep an artifact's files, checked, for the time being; yield a scratch directory on their file system.

        Raises:
            StoreError: as `directory`.
        """
        with self._explained(manifest):
            pin = self._while_nobody_evicts(lambda: Pin(self._root, _names(manifest)))
        try:
            with self._explained(manifest):
                renewed = self.keep(backend, manifest)
            yield pin.scratch
        finally:
            pin.end()
        if renewed:
            self._tidy()

    def keep(self, backend: Backend, manifest: Manifest) -> set[str]:
        """Have every file of an artifact here, checked; they must be pinned.

        Returns:
            The hashes of those that were not here, or not as they should be.
        """
        entries = {entry.sha256: entry for entry in manifest.files}.values()
        missing_bytes = sum(entry.size for entry in entries if not self.path(entry).exists())
        disk = shutil.disk_usage(self._root)
        if disk.free < missing_bytes <= disk.total:  # no eviction makes room for more than the disk
            self.evict(room_bytes=missing_bytes)
        with Downloads(backend) as downloads:
            found = downloads.each(lambda entry: self._keep_file(downloads, Wanted(manifest, entry)), entries)
        return {entry.sha256 for entry, was_renewed in zip(entries, found, strict=True) if was_renewed}

    def evict(self, room_bytes: int = 0) -> None:
        """Remove what nobody uses, least recently used first, while the cache is above its limit.

        Args:
            room_bytes: go on until so much is free on the disk.
        """
        self._while_nobody_evicts(lambda: evict(self._root, self._limit_bytes, room_bytes))

    def _tidy(self) -> None:
        """Evict after a fetch; the fetch has succeeded even if this fails."""
        try:
            self.evict()
        except (OSError, StoreError) as error:
            log.warning("the cache %s could not be brought within its limit: %s", self._root, error)

    def _keep_file(self, downloads: Downloads, wanted: Wanted) -> bool:
        """Have one file; return whether it had to be made."""
        entry, kept = wanted.entry, self.path(wanted.entry)
        elsewhere = self._root / wanted.manifest.digest / entry.path
        wrong = flaw(kept, entry)
        if wrong is not None:
            if wrong != MISSING or elsewhere.exists():
                log.warning("the cached copy of %s %s; it is mended from the store", wanted, wrong)
            part = self._root / PARTS / entry.sha256
            downloads.make(wanted, kept, part, donors=(kept, elsewhere), read_only=True)
        with suppress(OSError):  # another user's file: its time matters little
            os.utime(kept, ns=(time.time_ns(), kept.stat().st_mtime_ns))
        return wrong is not None

    def _directory(self, manifest: Manifest, scratch: Path, renewed: set[str]) -> Path:
        """Return the artifact's directory, which appears whole, and is put right where it is not as it was."""
        directory = self._root / manifest.digest
        if not directory.is_dir():
            fresh = scratch / uuid4().hex
            for entry in manifest.files:
                self._put(entry, target_of(fresh, entry, manifest.uri), scratch)
            with suppress(OSError):  # another process was first: its directory is as good
                fresh.rename(directory)
            shutil.rmtree(fresh, ignore_errors=True)
        self._remove_strangers(directory, manifest)  # first: a link may lead out of it
        for entry in manifest.files:
            target = target_of(directory, entry, manifest.uri)
            if self.has(target, entry):
                continue
            wrong = flaw(target, entry)
            if wrong is not None and entry.sha256 not in renewed:
                log.warning("%s %s; it is put back", target, wrong)
            self._put(entry, target, scratch)
        return directory

    def _put(self, entry: FileEntry, target: Path, scratch: Path) -> None:
        linked = put_link(self.path(entry), target, scratch)
        if not linked and flaw(target, entry) is not None:
            put_copy(self.path(entry), target, scratch / uuid4().hex)

    def _remove_strangers(self, directory: Path, manifest: Manifest) -> None:
        """Leave nothing in an artifact's directory that is not of it."""
        known = {entry.path for entry in manifest.files}
        for path in [path for path in directory.rglob("*") if not path.is_dir() or path.is_symlink()]:
            if path.relative_to(directory).as_posix() not in known:
                log.warning("%s is no file of %s; it is removed from the cache", path, manifest.uri)
                path.unlink(missing_ok=True)

    def _while_nobody_evicts(self, function: Callable[[], T]) -> T:
        """Call a function that is quick."""
        with own(self._root / "lock", LOCK_PATIENCE_S):
            return function()

    @contextmanager
    def _explained(self, manifest: Manifest) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"cannot keep {manifest.uri} in the cache {self._root}: {error.strerror or error}; see that it can be "
                f"written and has {manifest.size / GB:.3f} GB free, or choose another directory (RLHF_HOME)"
            ) from error


def _names(manifest: Manifest) -> Iterable[str]:
    """Return what is used while an artifact is: its directory and its files."""
    return [manifest.digest, *(entry.sha256 for entry in manifest.files)]


def evict(root: Path, limit_bytes: int, room_bytes: int = 0) -> None:
    """Remove what was used least recently until a cache is within its limit; nobody may pin meanwhile.

    Args:
        root: of the cache.
        limit_bytes: how large it may be.
        room_bytes: how much has to be free on its disk.
    """
    contents = _look(root, names_in_use(root))
    size, removed = contents.size, 0
    for entry in sorted(contents.entries, key=lambda entry: entry.used_at):
        if size <= limit_bytes and shutil.disk_usage(root).free >= room_bytes:
            break
        with suppress(PermissionError):  # another user's
            entry.remove()
            size -= entry.size
            removed += 1
    if removed:
        log.info("removed %d of %d files from the cache %s", removed, len(contents.entries), root)


def _look(root: Path, used: set[str]) -> _Contents:
    """Return what a cache holds, and of that what nobody uses."""
    contents = _Contents()
    kept = {path.parent.name + path.name: found for path, found in _files_under(root / FILES)}
    inodes = {found.st_ino for found in kept.values()}
    trees: dict[int, list[Path]] = {}
    for tree in (path for path in root.glob("*") if _TREE.fullmatch(path.name)):
        found = [stat for _, stat in _files_under(tree)]
        for inode in {stat.st_ino for stat in found} & inodes:
            trees.setdefault(inode, []).append(tree)
        own = [stat for stat in found if stat.st_ino not in inodes]  # copies, where files cannot be linked
        if own:
            size, used_at = sum(stat.st_size for stat in own), max(stat.st_atime for stat in own)
            _add(contents, tree.name in used, _Entry(used_at, size, partial(_remove_trees, root, [tree])))
    for name, stat in kept.items():
        remove = partial(_remove_file, root, name, trees.get(stat.st_ino, []))
        _add(contents, name in used, _Entry(stat.st_atime, stat.st_size, remove))
    for path, stat in _files_under(root / PARTS):
        remove = partial(path.unlink, missing_ok=True)
        _add(contents, path.name in used, _Entry(stat.st_mtime, stat.st_blocks * _BLOCK_BYTES, remove))
    return contents


def _add(contents: _Contents, is_used: bool, entry: _Entry) -> None:
    contents.size += entry.size
    if not is_used:
        contents.entries.append(entry)


def _files_under(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError, NotADirectoryError):  # it got its proper name since it was listed
            if not path.is_dir() or path.is_symlink():
                yield path, path.lstat()


def _remove_file(root: Path, name: str, trees: list[Path]) -> None:
    """Remove a file with the directories that have it too: with a name left, it would still take its place."""
    (root / FILES / name[:2] / name[2:]).unlink(missing_ok=True)
    _remove_trees(root, trees)


def _remove_trees(root: Path, trees: list[Path]) -> None:
    """Remove artifacts' directories, each in one step for everyone who looks."""
    for tree in trees:
        gone = root / PINS / uuid4().hex  # without a lock: another cleans it up should we be killed
        with suppress(FileNotFoundError):
            tree.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Something that may be removed."""

    used_at: float
    size: int
    remove: Callable[[], None]


@dataclass(slots=True)
class _Contents:
    """What a cache holds."""

    size: int = 0
    """Bytes of everything; a file with several names counts once."""
    entries: list[_Entry] = field(default_factory=list)


class Pin:
    """What a living process uses; nobody evicts it. It ends with `end`, or with the last process that has it open."""

    def __init__(self, root: Path, names: Iterable[str]) -> None:
        """Pin what has these names; nobody may evict meanwhile.

        Args:
            root: of the cache.
            names: hashes of files, digests of artifacts.
        """
        self.scratch = root / PINS / uuid4().hex
        """A directory on the cache's file system for what is being made; it goes when the pin ends."""
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
        """Pin these too; nobody may evict meanwhile."""
        more = set(names) - self._names
        data = "".join(f"\n{name}" for name in sorted(more)).encode()
        while data:
            data = data[os.write(self._descriptor, data) :]
        self._names |= more

    def has(self, names: Iterable[str]) -> bool:
        """Return whether all of these are pinned, and nobody has removed the file in which that stands."""
        return self._names.issuperset(names) and (self.scratch / _NAMES).exists()

    def end(self) -> None:
        """Release them."""
        unlock(self._descriptor)
        shutil.rmtree(self.scratch, ignore_errors=True)


class LifelongPins:
    """The pins that last as long as this process, one for each cache."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._pins: dict[Path, Pin] = {}
        os.register_at_fork(after_in_child=self._start_anew)

    def pin(self, root: Path, names: Iterable[str], begin: Callable[[Callable[[], Pin]], Pin]) -> Pin:
        """Pin these until the process ends.

        Args:
            root: of the cache.
            names: hashes of files, digests of artifacts.
            begin: calls what it is given while nobody evicts.
        """
        names = set(names)
        with self._lock:
            known = self._pins.get(root)
            if known is not None and known.has(names):
                return known
            self._pins[root] = begin(lambda: _extended(known, root, names))
            return self._pins[root]

    def _start_anew(self) -> None:
        """Leave the parent's pins to the parent: a child has its own, and keeps the parent's open besides."""
        self._lock = Lock()
        self._pins = {}


def _extended(known: Pin | None, root: Path, names: set[str]) -> Pin:
    if known is not None and not known.has(()):  # somebody has cleared the cache
        known.end()
        known = None
    if known is None:
        return Pin(root, names)
    known.add(names)
    return known


def names_in_use(root: Path) -> set[str]:
    """Return what living processes use; what the dead have left is removed.

    Raises:
        OSError: if it cannot be told whether a process lives: what it uses must not count as unused.
    """
    names: set[str] = set()
    for folder in (root / PINS).glob("*"):
        held = _names_of_living(folder / _NAMES)
        if held is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            names |= held
    return names


def _names_of_living(path: Path) -> set[str] | None:
    """Return what stands in a pin's file, or None if no process has it."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with open(descriptor, encoding="ascii") as file:
        return None if try_lock(descriptor) else set(file.read().split())


_lifelong = LifelongPins()

"""The local cache of fetched artifacts, shared by all processes of this machine.

Its unit is the file, under its SHA-256 and read-only; an artifact's directory is made of links to its files. What
the cache holds is not trusted: every byte is hashed whenever it is asked for, and what is wrong is fetched again.

    files/ab/cdef...    whole files           <digest>/       artifacts' directories
    parts/abcdef...     unfinished ones       holds/<id>/     what living processes use (holds.py)
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from infra.artifacts.backend import Backend
from infra.artifacts.download import MISSING, Downloads, Wanted, flaw
from infra.artifacts.eviction import FILES, PARTS, evict
from infra.artifacts.holds import Hold, LifelongHolds
from infra.artifacts.locks import own
from infra.artifacts.manifest import FileEntry, Manifest
from infra.artifacts.placing import put_copy, put_link, target_of
from infra.errors import StoreError

T = TypeVar("T")
log = logging.getLogger(__name__)

LIMIT_GB = 50.0
GB = 10**9
LOCK_PATIENCE_S = 120.0
"""Whoever evicts is waited for so long: it lists the cache and removes files."""
_lifelong = LifelongHolds()


class Cache:
    """Checked files by their hash, for several threads and processes at once."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        """Describe a cache; nothing is made before it is used.

        Args:
            root: its directory.
            limit_bytes: what it may hold after a fetch, but for what is in use.
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
            hold = _lifelong.hold(self._root, _names(manifest), self._while_nobody_evicts)
            renewed = self.keep(backend, manifest)
            directory = self._directory(manifest, hold.scratch, renewed)
        if renewed:
            self._tidy()
        return directory

    @contextmanager
    def holding(self, backend: Backend, manifest: Manifest) -> Iterator[Path]:
        """Keep an artifact's files, checked, for the time being; yield a scratch directory on their file system.

        Raises:
            StoreError: as `directory`.
        """
        with self._explained(manifest):
            hold = self._while_nobody_evicts(lambda: Hold(self._root, _names(manifest)))
        try:
            with self._explained(manifest):
                renewed = self.keep(backend, manifest)
            yield hold.scratch
        finally:
            hold.end()
        if renewed:
            self._tidy()

    def keep(self, backend: Backend, manifest: Manifest) -> set[str]:
        """Have every file of an artifact here, checked; they must be held.

        Returns:
            The hashes of those that were not here, or not as they should be.
        """
        entries = {entry.sha256: entry for entry in manifest.files}.values()
        missing_bytes = sum(entry.size for entry in entries if not self.path(entry).exists())
        disk = shutil.disk_usage(self._root)
        if disk.free < missing_bytes <= disk.total:  # what no disk holds makes no room, but an error
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
        """Evict after a fetch, which has succeeded whatever becomes of this."""
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
        with suppress(OSError):  # another user's file: its time does not matter much
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

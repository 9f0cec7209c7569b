"""The store in a directory: for one machine, or several that share a file system with locks."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from filelock import FileLock, Timeout

from infra.artifacts.backend import BOTH, CHUNK_BYTES, Stored, check_clock, enforced_conditions
from infra.artifacts.ref import VERSIONS
from infra.errors import AWAY_ERRNOS, StoreError, StoreNotReadyError

LOCK_TIMEOUT_S = 30.0
STALE_S = 24 * 3600.0
"""A temporary file of this age belongs to a writer that was killed."""
_READ_ONLY = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class LocalBackend:
    """Objects as files. What is written is on the disk, with its folder's entry, before a call returns."""

    def __init__(self, url: str, root: Path) -> None:
        self.url = url
        self._root = root
        self._temporary = root / "tmp"
        self._entered: set[Path] = set()
        """What has its entry on the disk: whoever made a folder may have been killed before that."""

    def probe(self) -> None:
        """Make the directory, try it, and clear what killed writers left; a store that may only be read is left."""
        with self._explained("open"):
            try:
                self._make_directory(self._temporary)
                self._check_clock()
            except OSError as error:
                if error.errno in _READ_ONLY and (self._root / VERSIONS).is_dir():
                    return
                raise
        enforced = enforced_conditions(self)
        if enforced != BOTH:
            raise StoreError(
                f"the file system of the artifact store {self._root} does not do {enforced.missing()}, so two writers "
                "would overwrite each other; choose a directory on another (RLHF_STORE_URL)"
            )
        with self._explained("open"):
            for leftover in self._temporary.iterdir():
                with suppress(OSError):  # gone, or not ours: what cannot be cleared does no harm
                    if time.time() - leftover.stat().st_mtime > STALE_S:
                        leftover.unlink()

    def read(self, key: str) -> Stored | None:
        """Return a small object, or None if there is none."""
        with self._explained(f"read {key} in"):
            try:
                data = self._path(key).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None
        return Stored(data, hashlib.sha256(data).hexdigest())

    def create(self, key: str, data: bytes) -> bool:
        """Write a small object unless one is there: a hard link to a finished file takes the name."""
        path = self._path(key)
        with self._explained("write to"):
            self._make_directory(path.parent)
            temporary = self._write_temporary(data)
            try:
                os.link(temporary, path)
            except FileExistsError:
                _sync_directory(path.parent)
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return self._create_under_lock(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
            _sync_directory(path.parent)
        return True

    def replace(self, key: str, data: bytes, tag: str) -> bool:
        """Write a small object if it is still in the state that `tag` names; a lock keeps others away."""
        with self._explained("write to"), self._locked():
            current = self.read(key)
            if current is None or current.tag != tag:
                return False
            self._move(self._write_temporary(data), self._path(key))
        return True

    def delete(self, key: str) -> None:
        """Remove an object; it may be gone already."""
        with self._explained("delete from"):
            path = self._path(key)
            path.unlink(missing_ok=True)
            if key.startswith(VERSIONS) and path.parent.is_dir():
                _sync_directory(path.parent)  # or a power cut could bring it back, after its blobs have gone

    def children(self, prefix: str, after: str = "", most: int | None = None) -> list[str]:
        """Return the sorted names directly under a prefix, however many are asked for: a directory is read whole."""
        del most
        return sorted(name for name in self._list(prefix) if name > after)

    def tags(self, prefix: str) -> dict[str, str]:
        """Return the names directly under a prefix, without tags: those would be made by reading each file."""
        return dict.fromkeys(self._list(prefix), "")

    def size(self, key: str) -> int | None:
        """Return the size of an object in bytes, or None if there is none."""
        with self._explained(f"read {key} in"):
            try:
                return self._path(key).stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def upload(self, key: str, body: bytes) -> None:
        """Write a blob under a temporary name, and move it into place."""
        with self._explained("write to"):
            path = self._path(key)
            self._make_directory(path.parent)
            self._move(self._write_temporary(body), path)

    def download(self, key: str, size: int) -> Iterator[bytes]:
        """Yield an object piece by piece; its reader counts and hashes the pieces."""
        del size  # a file ends by itself
        with self._explained(f"read {key} in"), self._path(key).open("rb") as file:
            while piece := file.read(CHUNK_BYTES):
                yield piece

    def _list(self, prefix: str) -> list[str]:
        with self._explained(f"list {prefix} in"):
            try:
                return os.listdir(self._path(prefix))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def _path(self, key: str) -> Path:
        return self._root / key

    def _make_directory(self, path: Path) -> None:
        """Make a directory of the store and its parents, each entered in its parent on the disk, whoever made it."""
        if path in self._entered and path.is_dir():
            return
        if path == self._root:
            _make_directory(path)
            self._entered.add(path)
        else:
            self._make_directory(path.parent)
            path.mkdir(exist_ok=True)
            entered = list(path.parent.iterdir())
            _sync_directory(path.parent)
            self._entered.update(entered)

    def _check_clock(self) -> None:
        """Compare our clock with that of the machine that keeps the files, which may be another one."""
        path = self._write_temporary(b"")
        written = path.stat().st_mtime
        path.unlink()
        check_clock(datetime.fromtimestamp(written, UTC), f"the file system of {self._root}")

    def _write_temporary(self, data: bytes) -> Path:
        """Write a finished file under a name of its own."""
        path = self._temporary / uuid4().hex
        try:
            with path.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    def _create_under_lock(self, temporary: Path, path: Path) -> bool:
        """Take the name where the file system has no hard links."""
        with self._locked():
            if path.exists():
                return False
            self._move(temporary, path)
        return True

    def _move(self, temporary: Path, path: Path) -> None:
        os.replace(temporary, path)
        _sync_directory(path.parent)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FileLock(self._root / ".lock", timeout=LOCK_TIMEOUT_S, poll_interval=0.01, fallback_to_soft=False)
        try:
            held = lock.acquire()
        except Timeout:
            raise StoreNotReadyError(
                f"the lock of the artifact store {self._root} was not free within "
                f"{LOCK_TIMEOUT_S:.0f} s; another process holds {lock.lock_file}"
            ) from None
        with held:
            yield

    @contextmanager
    def _explained(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            fault = StoreNotReadyError if error.errno in AWAY_ERRNOS else StoreError
            raise fault(
                f"cannot {verb} the artifact store in the directory {self._root}: {error.strerror or error}; "
                "choose a directory that can be written (RLHF_STORE_URL), or mend this one"
            ) from error


def _make_directory(path: Path) -> None:
    """Make a directory and its parents; those that we make are entered in their parents on the disk."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    path.mkdir(exist_ok=True)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Downloading an artifact's files: every byte is counted and hashed before anybody sees it under its name.

Several blobs come at a time, each checked, into a part file from which a killed download goes on.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Self, TypeVar

from infra.artifacts.backend import THREADS, Backend, in_parallel
from infra.artifacts.manifest import BlobEntry, FileEntry, Manifest
from infra.artifacts.ref import blob_key, enumerate_names
from infra.artifacts.shared_files import READ_BYTES, STALL_S, discard_parts, is_inside, is_part, own, part_of, target_of
from infra.errors import StoreError

T = TypeVar("T")
R = TypeVar("R")
ATTEMPTS = 2
"""A body may be damaged on its way; one that comes so twice is damaged in the store."""
MISSING = "is missing"


def fetch_directly(backend: Backend, manifest: Manifest, directory: Path) -> Path:
    """Download an artifact's files into a directory, past the cache; each appears whole and checked.

    Raises:
        StoreError: if the directory holds other files, or some that were altered, or cannot be written; if a path
            leads out of it (through a link, say), or a blob is not what it should be.
    """
    with filling(directory, manifest) as lacking, Downloads(backend) as downloads:

        def download(entry: FileEntry) -> None:
            target = target_of(directory, entry, manifest.uri)
            downloads.make(Wanted(manifest, entry), target, part_of(target, entry))

        downloads.each(download, lacking)
    return directory


@contextmanager
def filling(
    directory: Path, manifest: Manifest, is_mended: Callable[[Path, FileEntry], bool] = lambda *_: False
) -> Iterator[list[FileEntry]]:
    """Prepare a directory for an artifact; where the disk gives out, nothing new stays in it.

    Args:
        directory: made if need be.
        manifest: of the artifact.
        is_mended: whether the cache mends a file that is there, should it be wrong.

    Yields:
        The files that are to be put there: those that are there already are left alone, if they are right.

    Raises:
        StoreError: if it holds other files, or some that were altered, or cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _refuse_strangers(directory, manifest)
        there = {entry.path for entry in manifest.files if os.path.lexists(directory / entry.path)}
        lacking = [each for each in manifest.files if each.path not in there or is_mended(directory / each.path, each)]
        _refuse_altered(directory, manifest, there.difference(entry.path for entry in lacking))
        try:
            yield lacking
        except OSError:
            for target in (directory / entry.path for entry in lacking if entry.path not in there):
                if is_inside(target, directory):
                    target.unlink(missing_ok=True)
            raise
        discard_parts(directory)
    except OSError as error:
        raise StoreError(f"cannot write {manifest.uri} to {directory}: {error.strerror or error}") from error


def _refuse_strangers(directory: Path, manifest: Manifest) -> None:
    known = {entry.path for entry in manifest.files}
    if unfinished := sorted(path for path in known if is_part(Path(path))):
        raise StoreError(
            f"{manifest.uri} has files that are called as unfinished ones are ({enumerate_names(unfinished)}), and "
            "cannot be fetched into a directory; commit it again without them"
        )
    files = (path for path in directory.rglob("*") if not path.is_dir() and not is_part(path))
    if strangers := sorted({path.relative_to(directory).as_posix() for path in files} - known):
        raise StoreError(
            f"{directory} holds files that are not of {manifest.uri} ({enumerate_names(strangers)}); "
            "fetch into an empty directory"
        )


def _refuse_altered(directory: Path, manifest: Manifest, there: set[str]) -> None:
    """Refuse files that would stay and are wrong: a user's edits are neither overwritten nor returned as fetched."""
    entries = [entry for entry in manifest.files if entry.path in there]
    flaws = in_parallel(lambda entry: flaw(directory / entry.path, entry), entries)
    if altered := [entry.path for entry, wrong in zip(entries, flaws, strict=True) if wrong is not None]:
        raise StoreError(
            f"{directory} holds files that are not as {manifest.uri} has them ({enumerate_names(altered)}); "
            "fetch into an empty directory, or remove them first"
        )


def checked_pieces(backend: Backend, manifest: Manifest, entry: FileEntry) -> Iterator[bytes]:
    """Yield a file's body; the end is reached only if size and hash are those of the manifest.

    Raises:
        StoreError: if the blob is missing, truncated or altered; the message names file and blob.
    """
    wanted, whole = Wanted(manifest, entry), hashlib.sha256()
    for blob in entry.pieces:
        digest = hashlib.sha256()
        for chunk in stored_body(backend, blob, wanted.blob(blob)):
            digest.update(chunk)
            whole.update(chunk)
            yield chunk
        if digest.hexdigest() != blob.sha256:
            raise damaged(wanted.blob(blob), digest.hexdigest())
    if whole.hexdigest() != entry.sha256:
        raise inconsistent(wanted)


class Downloads:
    """Downloads under way: a few files and a few blobs at a time, whatever their number, so that memory is bounded."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._given_up = Event()
        self._errors: list[BaseException] = []
        self._files = ThreadPoolExecutor(THREADS, thread_name_prefix="files")
        self._blobs = ThreadPoolExecutor(THREADS, thread_name_prefix="blobs")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._give_up(error)
        self._files.shutdown(cancel_futures=True)
        self._blobs.shutdown(cancel_futures=True)

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Return the function's result for each item, in order; the first error ends it all."""

        def work(item: T) -> R:
            try:
                return function(item)
            except BaseException as error:
                self._give_up(error)
                raise

        futures = [self._files.submit(work, item) for item in items]
        wait(futures, return_when=FIRST_EXCEPTION)
        if self._errors:
            raise self._errors[0]  # those after it may come of it
        return [future.result() for future in futures]

    def _give_up(self, error: BaseException) -> None:
        """Tell what is under way that it has become useless."""
        self._errors.append(error)
        self._given_up.set()

    def _go_on(self, wanted: Wanted) -> None:
        """Raise StoreError if what is under way has become useless."""
        if self._given_up.is_set():
            raise StoreError(f"{wanted} was not fetched to its end: something else could not be fetched")

    def make(
        self,
        wanted: Wanted,
        target: Path,
        part: Path,
        *,
        donors: Sequence[Path] = (),
        read_only: bool = False,
    ) -> None:
        """Have a file on disk, whole and checked; processes that want the same wait for the one that downloads it.

        Args:
            wanted: which.
            target: what it is called when it is whole.
            part: what it is called until then, on the same file system; a killed download goes on from it.
            donors: files of which some bytes may be right, at the same place.
            read_only: take away everybody's right to write to it.

        Raises:
            StoreError: if a blob is not what it should be, or another process has stopped in its download.
            OSError: if it cannot be written; nothing of what is under way stays then.
        """
        with own(part, STALL_S, partial(self._go_on, wanted)) as descriptor:
            if flaw(target, wanted.entry) is None:  # another process was first
                part.unlink()
                return
            try:
                self._fill(descriptor, wanted, donors)
                if read_only:
                    with suppress(PermissionError):  # another user has begun it, and owns it
                        os.fchmod(descriptor, 0o444)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(part, target)
            except (OSError, StoreError) as error:
                if any(
                    isinstance(each, OSError) for each in (error, *self._errors)
                ):  # the disk failed or is full, here or in another thread
                    part.unlink(missing_ok=True)
                raise

    def _fill(self, descriptor: int, wanted: Wanted, donors: Sequence[Path]) -> None:
        """Bring every blob of a file to its place, and hash the whole as they come."""
        entry = wanted.entry
        resumed = os.fstat(descriptor).st_size > 0
        os.ftruncate(descriptor, entry.size)
        starts = accumulate((blob.size for blob in entry.pieces), initial=0)
        places = [_Place(wanted, blob, descriptor, start) for blob, start in zip(entry.pieces, starts, strict=False)]
        jobs = [self._blobs.submit(self._bring, place, donors, resumed) for place in places]
        try:
            found = _hash_in_order(places, jobs)
        except BaseException as error:
            self._give_up(error)
            raise
        finally:  # those that are on their way still write to the descriptor
            wait([job for job in jobs if not job.cancel()])
        if found != entry.sha256:
            os.ftruncate(descriptor, 0)
            raise inconsistent(wanted)

    def _bring(self, place: _Place, donors: Sequence[Path], resumed: bool) -> None:
        """Have one blob at its place: from what is there, from a donor, or from the store."""
        blob, where = place.blob, place.wanted.blob(place.blob)
        if resumed and place.is_begun() and place.hash() == blob.sha256:
            return
        from_donors = [partial(_read_range, donor, place.start, blob.size) for donor in donors]
        from_store = partial(stored_body, self._backend, blob, where)
        found = ""
        for read in [*from_donors, *[from_store] * ATTEMPTS]:
            found = self._write(place, read())
            if found == blob.sha256:
                return
        raise damaged(where, found)

    def _write(self, place: _Place, chunks: Iterable[bytes]) -> str:
        """Write a blob's body to its place, never past it; return the body's hash."""
        digest, done = hashlib.sha256(), 0
        for chunk in chunks:
            self._go_on(place.wanted)
            digest.update(chunk)
            _write_at(place.descriptor, chunk[: place.blob.size - done], place.start + done)
            done = min(done + len(chunk), place.blob.size)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a blob of a wanted file goes: to this place in an open part file."""

    wanted: Wanted
    blob: BlobEntry
    descriptor: int
    start: int

    def read(self) -> Iterator[bytes]:
        """Yield what is at the place."""
        for offset in range(0, self.blob.size, READ_BYTES):
            yield os.pread(self.descriptor, min(READ_BYTES, self.blob.size - offset), self.start + offset)

    def is_begun(self) -> bool:
        """Return whether anything was written there: a hole is not read, however large its manifest says it is."""
        try:
            return os.lseek(self.descriptor, self.start, os.SEEK_DATA) < self.start + self.blob.size
        except OSError as error:
            return error.errno != errno.ENXIO  # no data from there to the end

    def hash(self) -> str:
        """Return the hash of what is at the place."""
        digest = hashlib.sha256()
        for chunk in self.read():
            digest.update(chunk)
        return digest.hexdigest()


def _hash_in_order(places: Sequence[_Place], jobs: Sequence[Future[None]]) -> str:
    """Return the hash of the whole file, reading each blob once it is there.

    A file of one blob has that blob's hash, if its manifest is right.
    """
    whole = hashlib.sha256()
    for place, job in zip(places, jobs, strict=True):
        job.result()
        if len(places) == 1:
            return place.blob.sha256
        for chunk in place.read():
            whole.update(chunk)
    return whole.hexdigest()


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        if written == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        view, offset = view[written:], offset + written


def _read_range(path: Path, start: int, size: int) -> Iterator[bytes]:
    """Yield a part of a file as far as it can be read."""
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while size > 0 and (chunk := file.read(min(READ_BYTES, size))):
                size -= len(chunk)
                yield chunk
    except OSError:
        return


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file of an artifact that is to be had on this machine."""

    manifest: Manifest
    entry: FileEntry

    def __str__(self) -> str:
        return f"{self.entry.path!r} of {self.manifest.uri}"

    def blob(self, blob: BlobEntry) -> str:
        """Return how messages name one of its blobs."""
        return f"{self} (blob {blob_key(blob.sha256)})"


def flaw(path: Path, entry: FileEntry) -> str | None:
    """Return what is wrong with a file on disk, as the end of a sentence; None if every byte is right."""
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry.size:
                return f"has {size} B instead of {entry.size}"
            right = hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
    except (FileNotFoundError, NotADirectoryError):
        return MISSING
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if right else "is damaged"


def stored_body(backend: Backend, blob: BlobEntry, where: str) -> Iterator[bytes]:
    """Yield a blob as it comes from the store; its reader hashes it.

    Args:
        backend: where from.
        blob: which.
        where: what messages call it.

    Raises:
        StoreError: if it is missing or has another size.
    """
    key = blob_key(blob.sha256)
    size = backend.size(key)
    if size is None:
        raise StoreError(f"{where} is missing from the store; restore it from a backup, or commit it again")
    if size != blob.size:
        raise StoreError(f"{where} has {size} B instead of {blob.size}; restore it from a backup")
    yield from backend.download(key, size)


def damaged(where: str, found: str) -> StoreError:
    """Return the error for a blob whose content is not what its name says."""
    return StoreError(f"{where} is damaged: its content hashes to {found}; restore it from a backup")


def inconsistent(wanted: Wanted) -> StoreError:
    """Return the error for a file whose blobs are right, but are not that file's."""
    return StoreError(f"{wanted} does not hash to {wanted.entry.sha256}: its manifest is damaged")

"""Reading an artifact: every byte is counted and hashed before anybody sees it under its name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.artifacts.backend import Backend
from infra.artifacts.cache import Cache
from infra.artifacts.download import Downloads, Wanted, damaged, inconsistent, stored_body
from infra.artifacts.manifest import FileEntry, Manifest
from infra.artifacts.parallel import in_parallel
from infra.artifacts.placing import is_inside, is_part, part_of, put_copy, put_link, target_of
from infra.artifacts.ref import enumerate_names
from infra.errors import StoreError

COPIED_BYTES = 10**6
"""Files of at most this size are copied for their user, who may edit them: configurations, tokenizers."""


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


def fetch_directly(backend: Backend, manifest: Manifest, directory: Path) -> Path:
    """Download an artifact's files into a directory, past the cache; each appears whole and checked.

    Raises:
        StoreError: as `fetch_through`.
    """
    with _filling(directory, manifest), Downloads(backend) as downloads:

        def download(entry: FileEntry) -> None:
            target = target_of(directory, entry, manifest.uri)
            downloads.make(Wanted(manifest, entry), target, part_of(target, entry))

        downloads.each(download, manifest.files)
    return directory


def fetch_through(backend: Backend, manifest: Manifest, directory: Path, cache: Cache) -> Path:
    """Give a directory an artifact's files: links to those of the cache, or copies of the small ones.

    Raises:
        StoreError: if the directory holds other files or cannot be written, a path leads out of it (through a
            link, say), or a blob is not what it should be.
    """
    with _filling(directory, manifest), cache.holding(backend, manifest) as scratch:

        def put(entry: FileEntry) -> None:
            kept, target = cache.path(entry), target_of(directory, entry, manifest.uri)
            if entry.size <= COPIED_BYTES or not put_link(kept, target, scratch):
                put_copy(kept, target, entry)

        in_parallel(put, manifest.files)
    return directory


@contextmanager
def _filling(directory: Path, manifest: Manifest) -> Iterator[None]:
    """Prepare a directory for an artifact; where the disk gives out, nothing new stays in it.

    Raises:
        StoreError: if it holds other files, or cannot be written.
    """
    known = {entry.path for entry in manifest.files}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        present = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if _is_foreign(path)}
        if strangers := sorted(present - known):
            raise StoreError(
                f"{directory} holds files that are not of {manifest.uri} ({enumerate_names(strangers)}); "
                "fetch into an empty directory"
            )
        try:
            yield
        except OSError:
            for target in (directory / path for path in known - present):
                if is_inside(target, directory):
                    target.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StoreError(f"cannot write {manifest.uri} to {directory}: {error.strerror or error}") from error


def _is_foreign(path: Path) -> bool:
    """Return whether a path is a file, and not what a killed fetch has left."""
    return not path.is_dir() and not is_part(path)

"""Reading an artifact: every byte is counted and hashed before anybody sees it under its name."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from infra.artifacts.backend import Backend
from infra.artifacts.layout import blob_key
from infra.artifacts.manifest import BlobEntry, FileEntry, Manifest
from infra.artifacts.parallel import in_parallel
from infra.artifacts.ref import enumerate_names
from infra.errors import StoreError

STALE_S = 24 * 3600.0
"""An unfinished directory of this age belongs to a reader that was killed."""


def checked_pieces(backend: Backend, manifest: Manifest, entry: FileEntry) -> Iterator[bytes]:
    """Yield a file's body; the end is reached only if size and hash are those of the manifest.

    Raises:
        StoreError: if the blob is missing, truncated or altered; the message names file and blob.
    """
    whole = hashlib.sha256()
    for blob in entry.pieces:
        for chunk in _checked_blob(backend, blob, f"{entry.path!r} of {manifest.uri} (blob {blob_key(blob.sha256)})"):
            whole.update(chunk)
            yield chunk
    if whole.hexdigest() != entry.sha256:
        raise StoreError(f"{entry.path!r} of {manifest.uri} does not hash to {entry.sha256}: its manifest is damaged")


def fetch_files(backend: Backend, manifest: Manifest, directory: Path) -> Path:
    """Write an artifact's files into a directory, made if need be; each appears whole and checked.

    Raises:
        StoreError: if the directory holds other files or cannot be written, a path leads out of it (through a
            link, say), or a blob is not what it should be.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        known = {entry.path for entry in manifest.files}
        present = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir())
        if strangers := sorted(path for path in present if path not in known):
            raise StoreError(
                f"{directory} holds files that are not of {manifest.uri} ({enumerate_names(strangers)}); "
                "fetch into an empty directory"
            )
        in_parallel(lambda entry: _fetch_file(backend, manifest, entry, directory), manifest.files)
    except OSError as error:
        raise StoreError(f"cannot write {manifest.uri} to {directory}: {error.strerror or error}") from error
    return directory


def fetch_cached(backend: Backend, manifest: Manifest, cache: Path) -> Path:
    """Return a directory with an artifact's files, fetched once per content and reused by every process."""
    target = cache / manifest.digest
    if _is_complete(target, manifest):
        return target
    _remove_stale(cache)
    fresh = cache / f".fetching-{uuid4().hex}"
    try:
        fetch_files(backend, manifest, fresh)
        if target.exists() and not _is_complete(target, manifest):
            with suppress(FileNotFoundError):  # another process moved it away before us
                os.rename(target, cache / f".damaged-{uuid4().hex}")
        with suppress(OSError):  # another process was first: its files are as good
            os.rename(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    if not _is_complete(target, manifest):
        raise StoreError(f"cannot keep {manifest.uri} in {target}; check that the directory {cache} can be written")
    return target


def _checked_blob(backend: Backend, blob: BlobEntry, where: str) -> Iterator[bytes]:
    key = blob_key(blob.sha256)
    size = backend.size(key)
    if size is None:
        raise StoreError(f"{where} is missing from the store; restore it from a backup, or commit it again")
    if size != blob.size:
        raise StoreError(f"{where} has {size} bytes instead of {blob.size}; restore it from a backup")
    digest = hashlib.sha256()
    for chunk in backend.download(key, size):
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != blob.sha256:
        raise StoreError(f"{where} is damaged: its content hashes to {digest.hexdigest()}; restore it from a backup")


def _fetch_file(backend: Backend, manifest: Manifest, entry: FileEntry, directory: Path) -> None:
    target = directory / entry.path
    if not target.parent.resolve().is_relative_to(directory.resolve()):
        raise StoreError(f"{entry.path!r} of {manifest.uri} would be written outside of {directory}, through a link")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{uuid4().hex}.part")
    try:
        with unfinished.open("xb") as file:
            for piece in checked_pieces(backend, manifest, entry):
                file.write(piece)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def _is_complete(directory: Path, manifest: Manifest) -> bool:
    try:
        return all((directory / entry.path).stat().st_size == entry.size for entry in manifest.files)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _remove_stale(cache: Path) -> None:
    """Clear what killed readers left, and damaged copies that may have been in use when they were found."""
    for pattern in (".fetching-*", ".damaged-*"):
        for leftover in cache.glob(pattern):
            with suppress(FileNotFoundError):
                if time.time() - leftover.stat().st_mtime > STALE_S:
                    shutil.rmtree(leftover, ignore_errors=True)

"""Looking through the bodies of files for any that is missing, cut short, damaged or cannot be read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from infra.artifacts.backend import Backend
from infra.artifacts.layout import VERSIONS, blob_key, version_key
from infra.artifacts.manifest import BlobEntry, FileEntry, Manifest
from infra.artifacts.parallel import in_parallel
from infra.errors import StoreError

Progress = Callable[[int, int], None]
"""Is told how many bytes have been read since it was told last, and how many there are in all; from any thread."""


def problem_of(backend: Backend, error: StoreError) -> str:
    """Return an error as a problem of the one thing that was read.

    Raises:
        StoreError: if the store as a whole has gone away.
    """
    _ensure_there(backend)
    return str(error)


def _ensure_there(backend: Backend) -> None:
    """Raise StoreError if the store has gone away, as a disk does: it would look as if all were missing."""
    if not backend.children(VERSIONS):
        raise StoreError(f"the artifact store {backend.url} has gone away while it was looked through; try again")


def check_blobs(backend: Backend, manifests: list[Manifest], *, quick: bool, progress: Progress) -> list[str]:
    """Return what is wrong with the bodies of files; a file that several versions have is read once."""
    files = {(entry.sha256, entry.pieces): entry for manifest in manifests for entry in manifest.files}
    total = sum(entry.size for entry in files.values())
    progress(0, total)
    check = partial(_check_file, backend, quick=quick, read=lambda count: progress(count, total))
    complaints: dict[str, str] = {}
    for found in in_parallel(check, files.values()):
        complaints |= found
    if not complaints:
        return []
    _ensure_there(backend)
    users = _users(backend, manifests, complaints.keys())
    return [
        f"{complaint}: {users[digest][0]}{f' and {more} more' if (more := len(users[digest]) - 1) else ''} "
        "cannot be fetched; restore it, or remove the blob, if it is there, and commit the same again"
        for digest, complaint in complaints.items()
        if digest in users
    ]


def _check_file(backend: Backend, entry: FileEntry, *, quick: bool, read: Callable[[int], None]) -> dict[str, str]:
    """Return what is wrong with the blobs of a file, or with the file as a whole, by hash."""
    whole = hashlib.sha256()
    complaints = {}
    for blob in entry.pieces:
        if complaint := _check_blob(backend, blob, None if quick else whole):
            complaints[blob.sha256] = complaint
        read(blob.size)
    if not (quick or complaints) and whole.hexdigest() != entry.sha256:
        complaints[entry.sha256] = f"the blobs of {entry.path!r} do not make up what hashes to {entry.sha256}"
    return complaints


def _check_blob(backend: Backend, blob: BlobEntry, whole: Any) -> str | None:
    """Return what is wrong with a blob; its content is hashed where the hash of the whole file is given."""
    key = blob_key(blob.sha256)
    try:
        size = backend.size(key)
        if size is None:
            return f"{key} is missing"
        if size != blob.size:
            return f"{key} has {size} B instead of {blob.size}"
        return None if whole is None else _check_content(backend, blob, whole)
    except StoreError as error:
        problem = problem_of(backend, error)
        if _is_missing(backend, key):
            return f"{key} is missing"
        cause = error.__cause__
        return f"{key} cannot be read ({(isinstance(cause, OSError) and cause.strerror) or problem})"


def _check_content(backend: Backend, blob: BlobEntry, whole: Any) -> str | None:
    key, digest = blob_key(blob.sha256), hashlib.sha256()
    for chunk in backend.download(key, blob.size):
        digest.update(chunk)
        whole.update(chunk)
    found = digest.hexdigest()
    return None if found == blob.sha256 else f"{key} is damaged, its content hashes to {found}"


def _is_missing(backend: Backend, key: str) -> bool:
    """Return whether a blob that could not be read has just been taken by a deletion."""
    try:
        return backend.size(key) is None
    except StoreError:
        return False


def _users(backend: Backend, manifests: list[Manifest], damaged: Collection[str]) -> dict[str, list[str]]:
    """Return which files need each hash, of the versions that have not been removed since they were read."""
    found: dict[str, list[str]] = {}
    for manifest in manifests:
        needs = [
            (digest, f"{entry.path!r} of {manifest.uri}")
            for entry in manifest.files
            for digest in {entry.sha256, *(blob.sha256 for blob in entry.pieces)}.intersection(damaged)
        ]
        key = version_key(manifest.kind, manifest.name, manifest.version)
        if needs and backend.read(key) is not None:
            for digest, what in needs:
                found.setdefault(digest, []).append(what)
    return found

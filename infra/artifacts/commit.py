"""Writing an artifact: all bodies first, the manifest last. Until the manifest is there, nothing is."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from infra.artifacts.backend import CHUNK_BYTES, Backend
from infra.artifacts.layout import blob_key, version_key
from infra.artifacts.manifest import FileEntry, Manifest, check_path
from infra.artifacts.parallel import in_parallel
from infra.artifacts.pruning import lease
from infra.errors import StoreError, VersionExistsError

Source = Path | bytes
Sources = Mapping[str, Source]
NextVersion = Callable[[str, str], int]
NUMBER_TIMEOUT_S = 120.0


def gather_sources(files: Mapping[str, Source] | Path) -> dict[str, Source]:
    """Return what is to be stored, by its path in the artifact.

    Raises:
        StoreError: if a file or the directory is not there, nothing is given, or a path leads out.
    """
    if isinstance(files, Path):
        if not files.is_dir():
            raise StoreError(f"cannot store {files}: expected a directory; give a file as {{name: path}}")
        found = (path for path in sorted(files.rglob("*")) if path.is_file())
        files = {path.relative_to(files).as_posix(): path for path in found}
    if not files:
        raise StoreError("cannot store an artifact without files; give at least one")
    for path, source in files.items():
        check_path(path)
        if isinstance(source, Path) and not source.is_file():
            raise StoreError(f"cannot store {source} as {path!r}: there is no such file")
    return dict(files)


def describe(sources: Sources) -> tuple[FileEntry, ...]:
    """Return path, size and hash of each source, in the order of the paths."""
    return tuple(in_parallel(lambda path: _entry(path, sources[path]), sorted(sources)))


def commit(backend: Backend, draft: Manifest, sources: Sources, next_version: NextVersion | None) -> Manifest:
    """Send the blobs that are not there, then write the manifest.

    Args:
        backend: where to.
        draft: the manifest; its version is taken as it is unless `next_version` is given.
        sources: the body of each of its files.
        next_version: returns the version after the highest; asked again when another writer took it.

    Returns:
        The manifest as it stands in the store: the draft, or an equal one that was there.

    Raises:
        VersionExistsError: if the draft's version is taken by other content.
        StoreError: if the store cannot be written.
    """
    by_digest = {entry.sha256: (entry, sources[entry.path]) for entry in draft.files}
    with lease(backend, draft.writer, set(by_digest)):
        skipped = [digest for digest in in_parallel(lambda item: _send(backend, *item), by_digest.values()) if digest]
        manifest = _write_first_free(backend, draft, next_version) if next_version else _write(backend, draft)
        # A blob that was there may have been taken away by hand since: it is sent again.
        in_parallel(lambda digest: _send(backend, *by_digest[digest]), skipped)
    return manifest


def taken(found: Manifest) -> VersionExistsError:
    """Return the error for a version that holds other content than was to be written."""
    return VersionExistsError(
        f"{found.uri} is already in the store with other content (written {found.created:%Y-%m-%d %H:%M} "
        "UTC); versions never change: commit under another number"
    )


def _entry(path: str, source: Source) -> FileEntry:
    digest, size = hashlib.sha256(), 0
    if isinstance(source, bytes):
        return FileEntry(path=path, size=len(source), sha256=hashlib.sha256(source).hexdigest())
    with source.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
            size += len(piece)
    return FileEntry(path=path, size=size, sha256=digest.hexdigest())


def _send(backend: Backend, entry: FileEntry, source: Source) -> str | None:
    """Upload a blob unless it is there; return its hash if it was."""
    key = blob_key(entry.sha256)
    if backend.size(key) == entry.size:
        return entry.sha256
    backend.upload(key, source, entry.sha256)
    return None


def _write(backend: Backend, draft: Manifest) -> Manifest:
    """Write the manifest of a version that was asked for by number."""
    found = _create(backend, draft)
    if found is None:
        raise StoreError(f"{draft.uri} was removed while it was written; commit it again")
    if found.writer != draft.writer and found.digest != draft.digest:
        raise taken(found)
    return found


def _write_first_free(backend: Backend, draft: Manifest, next_version: NextVersion) -> Manifest:
    """Write the manifest under the first number that no other writer takes before us."""
    deadline = time.monotonic() + NUMBER_TIMEOUT_S
    while time.monotonic() < deadline:
        numbered = draft.model_copy(update={"version": next_version(draft.kind, draft.name)})
        found = _create(backend, numbered)
        if found is not None and found.writer == draft.writer:
            return found
    raise StoreError(
        f"no free version number for {draft.kind}/{draft.name} within {NUMBER_TIMEOUT_S:.0f} s: "
        "others took each one first; commit again"
    )


def _create(backend: Backend, draft: Manifest) -> Manifest | None:
    """Write a manifest unless one is there; return the one that is there then.

    A conditional write is refused to its own winner when its answer was lost: so read back who wrote it.
    """
    key = version_key(draft.kind, draft.name, draft.version)
    if backend.create(key, draft.to_json()):
        return draft
    stored = backend.read(key)
    return None if stored is None else Manifest.from_json(stored.data, draft.uri)

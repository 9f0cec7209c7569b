"""Writing an artifact: all bodies first, the manifest last. Until the manifest is there, nothing is.

A large file is several blobs, so that none is larger than a shard may be. The version is the number that was asked for,
the next free one, or one that holds the same already.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from infra.artifacts.backend import BODIES, Backend, in_parallel
from infra.artifacts.catalog import Catalog, KeyIndex, highest_version
from infra.artifacts.leases import Claim, Lease, LeaseOutlivedError, lease
from infra.artifacts.manifest import BlobEntry, FileEntry, Manifest, check_path
from infra.artifacts.ref import blob_key, content_key, version_key
from infra.errors import StoreError, StoreNotReadyError, VersionExistsError

Source = Path | bytes
PIECE_BYTES = 64 << 20
"""Size of the largest blob: the unit of sharing, parallelism, resumption and repair."""
NUMBER_ATTEMPTS = 1000
"""How many numbers a writer tries when others take each one first; a limit in time would count its stops too."""
LOOKS = 5
"""How often a writer looks again when a version with its content went before it could be claimed."""
Sources = Mapping[str, Source]
ATTEMPTS = 5
"""How often a writer begins again when it was stopped until its lease had run out."""


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


def describe_all(sources: Sources) -> tuple[FileEntry, ...]:
    """Return path, size and hashes of each source, in the order of the paths."""
    return tuple(in_parallel(lambda path: describe(path, sources[path]), sorted(sources), BODIES))


def commit(
    backend: Backend, draft: Manifest, sources: Sources, claim: Claim, write: Callable[[Lease], Manifest]
) -> Manifest:
    """Send the blobs that are not there, then write the manifest.

    Args:
        backend: where to.
        draft: the manifest, or what it will be except for its number.
        sources: the body of each of its files.
        claim: the versions that it may become, and the entries of the key index that will lead to it.
        write: writes the manifest and returns it, or the one of another writer who was first with the same.

    Raises:
        VersionExistsError: if the version is taken by other content.
        StoreError: if the store cannot be written.
    """
    bodies = _bodies(draft, sources)
    claim = claim.join(Claim(frozenset(bodies), frozenset(parent.uri for parent in draft.parents)))
    for attempt in range(ATTEMPTS):
        try:
            with lease(backend, draft.writer, claim) as held:
                skipped = send_missing(backend, bodies)
                manifest = write(held)
                resend(backend, bodies, list(bodies) if held.is_outlived else skipped, held)
                return manifest
        except LeaseOutlivedError:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def send_missing(backend: Backend, bodies: Mapping[str, Body]) -> list[str]:
    """Upload the blobs that the store does not hold; return the hashes of those that it does."""
    found = in_parallel(lambda body: _send(backend, body), bodies.values(), BODIES)
    return [digest for digest, was_there in zip(bodies, found, strict=True) if was_there]


def resend(backend: Backend, bodies: Mapping[str, Body], doubtful: Collection[str], held: Lease) -> None:
    """Upload those that were in the store before the manifest was, and are no longer.

    A lease that ran out while its writer was stopped protects nothing, and a person may delete anything.
    """
    if doubtful:
        held.await_deletions(Claim(frozenset(doubtful)))
        send_missing(backend, {digest: bodies[digest] for digest in doubtful})


def _bodies(draft: Manifest, sources: Sources) -> dict[str, Body]:
    """Return where the body of each blob is, by its hash."""
    bodies = {}
    for entry in draft.files:
        start = 0
        for blob in entry.pieces:
            bodies[blob.sha256] = Body(blob, sources[entry.path], start)
            start += blob.size
    return bodies


@dataclass(frozen=True, slots=True)
class Body:
    """Where the body of one blob is: at this place in its source."""

    blob: BlobEntry
    source: Source
    start: int

    def read(self) -> bytes:
        """Return the body.

        Raises:
            StoreError: if it is no longer what it was when it was described.
        """
        body = read_piece(self.source, self.start, self.blob.size)
        if isinstance(self.source, Path) and hashlib.sha256(body).hexdigest() != self.blob.sha256:
            raise StoreError(f"{self.source} changed while it was stored")
        return body


def _send(backend: Backend, body: Body) -> bool:
    """Upload a blob unless it is there; return whether it was."""
    key = blob_key(body.blob.sha256)
    if backend.size(key) == body.blob.size:
        return True
    backend.upload(key, body.read())
    return False


def numbered(backend: Backend, catalog: Catalog, draft: Manifest) -> Manifest | None:
    """Return the version of the number that was asked for, or None if it is free.

    Raises:
        VersionExistsError: if the number is, or was, taken by other content.
    """
    found = catalog.read(draft.kind, draft.name, draft.version)
    if found is not None and found.digest != draft.digest:
        raise _taken(found)
    if found is None:
        highest = highest_version(backend, draft.kind, draft.name, leave_hint=True)
        if highest > draft.version:
            raise VersionExistsError(
                f"{draft.uri} cannot be written: {draft.kind}/{draft.name} has gone on to {highest}, and a number "
                "that was removed is not given again; commit under a higher one"
            )
    return found


def write_numbered(backend: Backend, catalog: Catalog, draft: Manifest, held: Lease) -> Manifest:
    """Write the manifest of a version that was asked for by number; return it, or an equal one that was there.

    Raises:
        VersionExistsError: if the number is, or was, taken by other content.
        StoreNotReadyError: if it was removed in between.
    """
    found = numbered(backend, catalog, draft) or _create(backend, draft, held)
    if found is None:
        raise StoreNotReadyError(f"{draft.uri} was removed while it was written; commit it again")
    if found.writer != draft.writer and found.digest != draft.digest:
        raise _taken(found)
    return found


def write_next(backend: Backend, catalog: Catalog, draft: Manifest, held: Lease) -> Manifest:
    """Write the manifest under the next free number, or return the version that a commit would only repeat.

    The lease is written before the numbers are listed: so no number above the highest was ever given, and those that
    others take meanwhile are not deleted. The entry of the content is written before the manifest.

    Args:
        backend: where to.
        catalog: the manifests that are there.
        draft: the manifest except for its number.
        held: the lease.

    Returns:
        The manifest as it stands in the store: ours, or another's with the very same.

    Raises:
        StoreNotReadyError: if others took each of many numbers first.
    """
    first = highest_version(backend, draft.kind, draft.name, leave_hint=True) + 1
    for version in range(first, first + NUMBER_ATTEMPTS):
        next_one = draft.model_copy(update={"version": version})
        found = _same(backend, catalog, next_one, held) or _create(backend, next_one, held)
        if found is not None and (found.writer == draft.writer or found.identity == draft.identity):
            return found
    raise StoreNotReadyError(
        f"no free version number for {draft.kind}/{draft.name} from {first} on in {NUMBER_ATTEMPTS} attempts: "
        "others took each one first; commit again"
    )


def _same(backend: Backend, catalog: Catalog, draft: Manifest, held: Lease) -> Manifest | None:
    """Return the version that has this content already, or None: then the entry of the content leads to the draft."""
    index, key = KeyIndex(backend, catalog), content_key(draft.kind, draft.identity)
    for _ in range(LOOKS):
        found = index.enter(draft, key)
        if found is None or _stays(catalog, found, held):
            return found
    return None


def _stays(catalog: Catalog, found: Manifest, held: Lease) -> bool:
    """Claim a version, and return whether it is still there: a deletion that was under way has ended by then."""
    held.cover(Claim(versions=frozenset({found.uri})))
    return catalog.read(found.kind, found.name, found.version) is not None


def _create(backend: Backend, draft: Manifest, held: Lease) -> Manifest | None:
    """Write a manifest unless one is there; return the one that is there then.

    When the answer to a conditional write was lost, its own winner is refused the next time: so read back who wrote it.
    """
    key = version_key(draft.kind, draft.name, draft.version)
    held.check()
    if backend.create(key, draft.to_json()):
        return draft
    stored = backend.read(key)
    return None if stored is None else Manifest.from_json(stored.data, draft.uri)


def _taken(found: Manifest) -> VersionExistsError:
    """Return the error for a version that holds other content than was to be written."""
    return VersionExistsError(
        f"{found.uri} is already in the store with other content (written {found.created:%Y-%m-%d %H:%M} "
        "UTC); versions never change: commit under another number"
    )


def describe(path: str, source: Source) -> FileEntry:
    """Return size and hash of a file that is to be stored, and of the blobs that it is cut into.

    Args:
        path: of the file in its artifact.
        source: its body, or where it lies.

    Raises:
        StoreError: if the file cannot be read.
    """
    whole = hashlib.sha256()
    blobs: list[BlobEntry] = []
    for piece in _read_pieces(source):
        digest = hashlib.sha256(piece)
        if blobs:
            whole.update(piece)
        else:
            whole = digest.copy()  # a copy of the first blob's hash: most files are one blob, and hashed once
        blobs.append(BlobEntry(size=len(piece), sha256=digest.hexdigest()))
    size = sum(blob.size for blob in blobs)
    return FileEntry(path=path, size=size, sha256=whole.hexdigest(), blobs=tuple(blobs) if len(blobs) > 1 else ())


def read_piece(source: Source, start: int, size: int) -> bytes:
    """Return the bytes of one blob of a file; fewer if the file has become shorter.

    Raises:
        StoreError: if the file cannot be read.
    """
    if isinstance(source, bytes):
        return source[start : start + size]
    with _opened(source) as file:
        file.seek(start)
        return file.read(size)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file that is to be stored."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise StoreError(f"cannot store {path}: {error.strerror or error}") from None


def _read_pieces(source: Source) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield from (source[start : start + PIECE_BYTES] for start in range(0, len(source), PIECE_BYTES))
        return
    with _opened(source) as file:
        while piece := file.read(PIECE_BYTES):
            yield piece

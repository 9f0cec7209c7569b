"""Writing an artifact: all bodies first, the manifest last. Until the manifest is there, nothing is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.artifacts.backend import Backend
from infra.artifacts.layout import blob_key
from infra.artifacts.leases import Claim, Lease, LeaseOutlivedError, await_deletions, lease
from infra.artifacts.manifest import BlobEntry, FileEntry, Manifest, check_path
from infra.artifacts.parallel import BODIES, in_parallel
from infra.artifacts.pieces import Source, describe, read_piece
from infra.errors import StoreError

Sources = Mapping[str, Source]
ATTEMPTS = 5
"""How often a writer begins anew when it was stopped until its lease had run out."""


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
        draft: the manifest, or what it will be but for its number.
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
                resend(backend, bodies, list(bodies) if held.is_outlived else skipped)
                return manifest
        except LeaseOutlivedError:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def send_missing(backend: Backend, bodies: Mapping[str, Body]) -> list[str]:
    """Upload the blobs that the store does not hold; return the hashes of those that it does."""
    found = in_parallel(lambda body: _send(backend, body), bodies.values(), BODIES)
    return [digest for digest, was_there in zip(bodies, found, strict=True) if was_there]


def resend(backend: Backend, bodies: Mapping[str, Body], doubtful: Collection[str]) -> None:
    """Upload those that were in the store before the manifest was, and are no longer.

    A lease that ran out while its writer was stopped protects nothing, and hands delete what they like.
    """
    if doubtful:
        await_deletions(backend, Claim(frozenset(doubtful)))
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


def _send(backend: Backend, body: Body) -> bool:
    """Upload a blob unless it is there; return whether it was."""
    key = blob_key(body.blob.sha256)
    if backend.size(key) == body.blob.size:
        return True
    backend.upload(key, body.read())
    return False

"""Which version a commit becomes: the number that was asked for, the next free one, or one that is there already."""

from __future__ import annotations

from infra.artifacts.backend import Backend
from infra.artifacts.catalog import Catalog
from infra.artifacts.index import KeyIndex
from infra.artifacts.layout import content_key, version_key
from infra.artifacts.leases import Claim, Lease
from infra.artifacts.manifest import Manifest
from infra.artifacts.newest import highest_version
from infra.errors import StoreError, VersionExistsError

NUMBER_ATTEMPTS = 1000
"""How many numbers a writer tries that others take from it; time does not count, for it may be stopped."""
LOOKS = 5
"""How often a writer finds a version with its content that has gone before it could be claimed."""


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
        StoreError: if it was removed in between.
    """
    found = numbered(backend, catalog, draft) or _create(backend, draft, held)
    if found is None:
        raise StoreError(f"{draft.uri} was removed while it was written; commit it again")
    if found.writer != draft.writer and found.digest != draft.digest:
        raise _taken(found)
    return found


def write_next(backend: Backend, catalog: Catalog, draft: Manifest, held: Lease) -> Manifest:
    """Write the manifest under the next free number, or return the version that a commit would only repeat.

    The lease is there before the numbers are listed: so none above the highest was ever given, and those that others
    take meanwhile are not deleted. The entry of the content stands before the manifest does.

    Args:
        backend: where to.
        catalog: the manifests that are there.
        draft: the manifest but for its number.
        held: the lease.

    Returns:
        The manifest as it stands in the store: ours, or another's with the very same.
    """
    first = highest_version(backend, draft.kind, draft.name, leave_hint=True) + 1
    for version in range(first, first + NUMBER_ATTEMPTS):
        next_one = draft.model_copy(update={"version": version})
        found = _same(backend, catalog, next_one, held) or _create(backend, next_one, held)
        if found is not None and (found.writer == draft.writer or found.identity == draft.identity):
            return found
    raise StoreError(
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
    """Claim a version, and return whether it is there still: whoever was about to delete it has ended by then."""
    held.cover(Claim(versions=frozenset({found.uri})))
    return catalog.read(found.kind, found.name, found.version) is not None


def _create(backend: Backend, draft: Manifest, held: Lease) -> Manifest | None:
    """Write a manifest unless one is there; return the one that is there then.

    A conditional write is refused to its own winner when its answer was lost: so read back who wrote it.
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

"""What nothing reaches any longer, found without writing anything."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

from infra.artifacts.aliases import list_aliases
from infra.artifacts.backend import Backend
from infra.artifacts.catalog import Catalog
from infra.artifacts.exclusive import old_run_locks
from infra.artifacts.index import KeyIndex, keys_of
from infra.artifacts.layout import ALIASES, BLOBS, DELETING, KEYS, LEASES, PROBES, VERSIONS, blob_key
from infra.artifacts.leases import INTENT_LIFE, LEASE_LIFE, Claim, claims
from infra.artifacts.manifest import BlobEntry, Manifest
from infra.artifacts.parallel import in_parallel
from infra.artifacts.ref import KINDS, enumerate_names
from infra.artifacts.retention import Retention, reached
from infra.errors import StoreError

LEFTOVER = rf"^{PROBES}[A-Za-z0-9][A-Za-z0-9._-]*$"
"""What the key of a leftover looks like: anything else is not ours to delete."""
_FOLDER, _REST = re.compile(r"[0-9a-f]{2}"), re.compile(r"[0-9a-f]{62}")


@dataclass(frozen=True, slots=True)
class Survey:
    """What could go."""

    retired: list[Manifest]
    """Versions that the rules no longer keep."""
    freed: dict[str, list[BlobEntry]]
    """The blobs that only they reach, by the kind of the first that does."""
    orphans: list[BlobEntry]
    """The blobs that no version and no lease reaches: of writers that were killed, mostly."""
    leftovers: list[str]
    """Keys of what openings of the store left when they were killed."""
    stale_keys: list[str]
    """Entries of the key index that lead to nothing; they need no grace time, for nothing is lost with them."""
    old_locks: list[str]
    """Keys of the locks of runs that ended long ago: nobody starts them again."""
    stale_leases: int
    unfinished: int
    """Deletions whose process was killed."""

    @property
    def blob_bytes(self) -> dict[str, int]:
        """Size of every blob that could go, by its hash."""
        return {blob.sha256: blob.size for blobs in (self.orphans, *self.freed.values()) for blob in blobs}


def survey(backend: Backend, catalog: Catalog, retention: Retention) -> Survey:
    """Return what the rules, aliases and leases no longer keep.

    Blobs are listed first and manifests read last: whatever a writer sends meanwhile is leased or named by then.

    Raises:
        StoreError: if something in the store cannot be read, so that what it reaches is not known.
    """
    stored = _stored_blobs(backend)
    leases = list(claims(backend, LEASES))
    leased = reduce(Claim.join, (claim for _, claim, age in leases if age <= LEASE_LIFE), Claim())
    manifests = every_manifest(backend, catalog)
    retired = retention.retired(manifests, staying(backend, leased, manifests))
    gone = {manifest.uri for manifest in retired}
    needed = {blob.sha256 for each in manifests if each.uri not in gone for blob in each.blobs} | leased.blobs
    freed = _freed(retired, needed)
    named = needed.union(blob.sha256 for blobs in freed.values() for blob in blobs)
    return Survey(
        retired=retired,
        freed=freed,
        orphans=_sized(backend, sorted(stored - named)),
        leftovers=[key for name in backend.children(PROBES) if re.match(LEFTOVER, key := PROBES + name)],
        stale_keys=_stale_keys(backend, catalog, manifests),
        old_locks=old_run_locks(backend),
        stale_leases=sum(age > LEASE_LIFE for _, _, age in leases),
        unfinished=sum(age > INTENT_LIFE for _, _, age in claims(backend, DELETING)),
    )


def every_manifest(backend: Backend, catalog: Catalog) -> list[Manifest]:
    """Return all manifests: whoever deletes must know what each of them reaches.

    Raises:
        StoreError: if there may be some that this release cannot read.
    """
    refuse_unknown_kinds(backend)
    return catalog.every()


def refuse_unknown_kinds(backend: Backend) -> None:
    """Raise StoreError if there are versions that this release does not see: what they reach must not be deleted."""
    if unknown := sorted(set(backend.children(VERSIONS)) - set(KINDS)):
        raise StoreError(
            f"the store holds versions of a kind that this release does not know ({enumerate_names(unknown)}), and "
            "what they reach must not be deleted; upgrade rlhf-flows to collect"
        )


def staying(backend: Backend, leased: Claim, manifests: Iterable[Manifest]) -> set[str]:
    """Return the references of all versions that an alias or a lease reaches through parents.

    Args:
        backend: where the aliases are; they are read after the leases, for a mover's ends when its move is done.
        leased: what somebody relies on by lease.
        manifests: of all versions.
    """
    known = list(manifests)
    pointed = in_parallel(lambda artifact: list_aliases(backend, *artifact), with_aliases(backend))
    roots = {alias.uri for aliases in pointed for alias in aliases.values()}
    return reached(roots.union(each.uri for each in known if leased.covers(each.uri)), known)


def with_aliases(backend: Backend) -> list[tuple[str, str]]:
    """Return kind and name of all artifacts that have, or had, an alias."""
    return [(kind, name) for kind in KINDS for name in backend.children(f"{ALIASES}{kind}/")]


def _stale_keys(backend: Backend, catalog: Catalog, manifests: Iterable[Manifest]) -> list[str]:
    """Return the entries of the key index that lead to nothing; those that a version has by right are not read."""
    there = [f"{KEYS}{kind}/{name}" for kind in KINDS for name in backend.children(f"{KEYS}{kind}/")]
    others = sorted(set(there).difference(*map(keys_of, manifests)))
    stale = in_parallel(KeyIndex(backend, catalog).is_stale, others)
    return [key for key, is_stale in zip(others, stale, strict=True) if is_stale]


def _freed(retired: Iterable[Manifest], needed: set[str]) -> dict[str, list[BlobEntry]]:
    seen = set(needed)
    freed: dict[str, list[BlobEntry]] = {}
    for manifest in retired:
        blobs = freed.setdefault(manifest.kind, [])
        for blob in manifest.blobs:
            if blob.sha256 not in seen:
                seen.add(blob.sha256)
                blobs.append(blob)
    return freed


def _stored_blobs(backend: Backend) -> set[str]:
    """Return the hashes of all blobs; what has no such name was put there by somebody else, and stays."""
    folders = [folder for folder in backend.children(BLOBS) if _FOLDER.fullmatch(folder)]
    found = in_parallel(lambda folder: backend.children(f"{BLOBS}{folder}/"), folders)
    names = zip(folders, found, strict=True)
    return {folder + rest for folder, rests in names for rest in rests if _REST.fullmatch(rest)}


def _sized(backend: Backend, hashes: Iterable[str]) -> list[BlobEntry]:
    """Return the blobs with their sizes, less those that are gone by now."""
    listed = list(hashes)
    sizes = in_parallel(lambda digest: backend.size(blob_key(digest)), listed)
    return [BlobEntry(size=n, sha256=digest) for digest, n in zip(listed, sizes, strict=True) if n is not None]

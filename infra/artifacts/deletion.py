"""Deleting versions and blobs without taking what others reach (the protocol: leases.py)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple
from uuid import uuid4

from infra.artifacts import clock
from infra.artifacts.backend import Backend
from infra.artifacts.catalog import Catalog
from infra.artifacts.index import KeyIndex, keys_of
from infra.artifacts.layout import DELETING, blob_key, version_key
from infra.artifacts.leases import INTENT_LIFE, Claim, claims, live_leases
from infra.artifacts.manifest import Manifest
from infra.artifacts.parallel import in_parallel
from infra.artifacts.survey import every_manifest, staying

DELETE_LIMIT_S = 60.0
"""Nothing is deleted later than this after the intent; what is left then is the next deletion's to finish."""


class Deleted(NamedTuple):
    """What was deleted."""

    versions: list[Manifest]
    blobs: list[str]


def delete_unreached(
    backend: Backend,
    catalog: Catalog,
    versions: Collection[Manifest] = (),
    blobs: Iterable[str] = (),
    keys: Collection[str] = (),
) -> Deleted:
    """Delete versions that no alias or lease reaches, then what nothing that is left leads to.

    Every manifest is read once, and every alias if there are versions.

    Args:
        backend: where.
        catalog: its manifests.
        versions: to be deleted; their blobs and entries of the key index are candidates too. Never the newest of a
            name: its number would be given again.
        blobs: other candidates, by hash.
        keys: other candidates among the entries of the key index.

    Returns:
        What was deleted; less than asked for when others rely on it or time ran out.
    """
    orphaned = [(key, claim) for key, claim, age in claims(backend, DELETING) if age > INTENT_LIFE]
    doomed = set(blobs).union(
        (blob.sha256 for each in versions for blob in each.blobs), *(claim.blobs for _, claim in orphaned)
    )
    claim = Claim(frozenset(doomed), frozenset(each.uri for each in versions), keys=_entries(keys, versions))
    intent = _Intent(backend, claim)
    leased = live_leases(backend)  # before the manifests: a lease ends only when its manifest is there
    manifests = every_manifest(backend, catalog) if doomed or versions else []
    kept = staying(backend, leased, manifests) if versions else set()
    gone = [each for each in versions if each.uri not in kept and intent.delete(_place(each))]
    uris = {each.uri for each in gone}
    doomed -= leased.blobs.union(blob.sha256 for each in manifests if each.uri not in uris for blob in each.blobs)
    deleted = in_parallel(lambda digest: intent.delete(blob_key(digest)), ordered := sorted(doomed))
    _delete_entries(backend, catalog, intent, _entries(keys, gone) - leased.keys)
    if all(deleted):
        for key in [*(key for key, _ in orphaned), intent.key]:
            backend.delete(key)
    return Deleted(gone, [digest for digest, is_gone in zip(ordered, deleted, strict=True) if is_gone])


class _Intent:
    """Tells others what is about to be deleted, and deletes it while they believe that.

    Args:
        backend: where.
        claim: all that may be deleted.
    """

    def __init__(self, backend: Backend, claim: Claim) -> None:
        self.key = f"{DELETING}{uuid4().hex}.json"
        self._backend = backend
        self._started = clock.boottime()
        backend.create(self.key, claim.to_json())

    def delete(self, key: str) -> bool:
        """Delete something, unless it is too late for that; return whether it was done."""
        if clock.boottime() - self._started >= DELETE_LIMIT_S:
            return False
        self._backend.delete(key)
        return True


def _place(manifest: Manifest) -> str:
    return version_key(manifest.kind, manifest.name, manifest.version)


def _entries(keys: Iterable[str], versions: Iterable[Manifest]) -> frozenset[str]:
    """Return some entries of the key index, and those that may lead to these versions."""
    return frozenset(keys).union(*map(keys_of, versions))


def _delete_entries(backend: Backend, catalog: Catalog, intent: _Intent, entries: Iterable[str]) -> None:
    """Delete the entries of the key index that lead to nothing; of those that time does not suffice for, the next."""
    index = KeyIndex(backend, catalog)
    in_parallel(lambda key: index.is_stale(key) and intent.delete(key), sorted(entries))

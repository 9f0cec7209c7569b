"""Deleting versions and blobs without taking what others reach (the protocol: leases.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple
from uuid import uuid4

from infra.artifacts import clock
from infra.artifacts.backend import Backend
from infra.artifacts.layout import DELETING, blob_key, content_key, index_key, version_key
from infra.artifacts.leases import INTENT_LIFE, Claim, claims, live_leases
from infra.artifacts.manifest import Manifest
from infra.artifacts.parallel import in_parallel

DELETE_LIMIT_S = 60.0
"""Nothing is deleted later than this after the intent; what is left then is the next deletion's to finish."""


class Deleted(NamedTuple):
    """What was deleted."""

    versions: list[Manifest]
    blobs: list[str]


def delete_unreached(
    backend: Backend,
    versions: Iterable[Manifest],
    blobs: Collection[str],
    *,
    needed: Callable[[], Collection[str]],
    manifests: Callable[[], Iterable[Manifest]],
) -> Deleted:
    """Delete versions that nobody points at or leases, then blobs that no version and no lease reaches.

    Args:
        backend: where.
        versions: to be deleted; their blobs are candidates too. Never the newest of a name: its number would be
            given again.
        blobs: other candidates, by hash.
        needed: returns the references of versions that must stay (those that aliases reach); called after the
            intent is stated.
        manifests: reads every manifest of the store; called after the versions are gone.

    Returns:
        What was deleted; less than asked for when others rely on it or time ran out.
    """
    started = clock.boottime()
    orphaned = [(key, claim) for key, claim, age in claims(backend, DELETING) if age > INTENT_LIFE]
    old = list(versions)
    doomed = set(blobs).union(
        (blob.sha256 for manifest in old for blob in manifest.blobs), *(claim.blobs for _, claim in orphaned)
    )
    intent = f"{DELETING}{uuid4().hex}.json"
    claim = Claim(frozenset(doomed), frozenset(manifest.uri for manifest in old))
    backend.create(intent, claim.to_json())

    def in_time() -> bool:
        return clock.boottime() - started < DELETE_LIMIT_S

    leased = live_leases(backend)  # before the manifests: a lease ends only when its manifest is there
    kept = set(needed()) if old else set()
    going = [each for each in old if each.uri not in kept and not leased.covers(each.uri)]
    gone = [each for each in going if in_time() and _delete_version(backend, each)]
    doomed -= leased.blobs
    if doomed:
        doomed -= {blob.sha256 for manifest in manifests() for blob in manifest.blobs}

    def delete_blob(digest: str) -> str | None:
        if not in_time():
            return None
        backend.delete(blob_key(digest))
        return digest

    deleted = [digest for digest in in_parallel(delete_blob, sorted(doomed)) if digest]
    if len(deleted) == len(doomed):
        for key in [*(key for key, _ in orphaned), intent]:
            backend.delete(key)
    return Deleted(gone, deleted)


def _delete_version(backend: Backend, manifest: Manifest) -> bool:
    backend.delete(version_key(manifest.kind, manifest.name, manifest.version))
    indexed = [content_key(manifest.kind, manifest.identity)]
    indexed += [] if manifest.key is None else [index_key(manifest.kind, manifest.key)]
    for key in indexed:
        stored = backend.read(key)
        if stored is not None and _uri_in(stored.data) == manifest.uri:
            backend.delete(key)
    return True


def _uri_in(entry: bytes) -> str | None:
    """Return what an entry of the key index points at; None if it cannot be read, which verification tells."""
    try:
        return str(json.loads(entry)["uri"])
    except (ValueError, KeyError, TypeError):
        return None

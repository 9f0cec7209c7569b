"""Taking old versions away without taking what others reach.

A writer leases the hashes that it is about to name, then looks for intents to delete; a pruner states its
intent, then looks for leases and manifests. Whichever came second sees the other: no blob is relied on by one
while the other deletes it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from infra.artifacts.backend import Backend
from infra.artifacts.layout import LEASES, TRASH, blob_key, index_key, version_key
from infra.artifacts.manifest import Manifest
from infra.artifacts.parallel import in_parallel
from infra.errors import StoreError, VersionExistsError

PRUNE_LIMIT_S = 60.0
"""A pruner deletes nothing later than this after its intent."""
INTENT_LIFE = timedelta(minutes=4)
"""A pruner is taken for dead after this: its limit, one request's deadline, and some."""
LEASE_LIFE = timedelta(days=1)
"""The lease of a writer that was killed protects its blobs no longer than this."""


@contextmanager
def lease(backend: Backend, writer: str, blobs: set[str]) -> Iterator[None]:
    """Keep pruners from the blobs that we are about to name; begin when none is deleting one of them."""
    key = f"{LEASES}{writer}.json"
    backend.create(key, _encode(blobs))
    _await_pruners(backend, blobs)
    try:
        yield
    except VersionExistsError:
        backend.delete(key)
        raise
    backend.delete(key)  # not after other errors: a store that is away would keep us waiting once more


def prune(backend: Backend, old: list[Manifest], all_manifests: Callable[[], Iterable[Manifest]]) -> None:
    """Delete manifests, then the blobs that only they reached.

    Args:
        backend: where.
        old: the manifests to delete.
        all_manifests: reads every manifest of the store; called after the old ones are gone.
    """
    started = time.monotonic()
    orphaned = _abandoned_intents(backend)
    blobs = {entry.sha256 for manifest in old for entry in manifest.files}.union(*orphaned.values())
    intent = f"{TRASH}{uuid4().hex}.json"
    backend.create(intent, _encode(blobs))
    for manifest in old:
        backend.delete(version_key(manifest.kind, manifest.name, manifest.version))
        _forget_key(backend, manifest)
    doomed = blobs - _live_leases(backend)  # before the manifests: a lease ends only when its manifest is there
    if doomed:
        doomed -= {entry.sha256 for manifest in all_manifests() for entry in manifest.files}

    def delete(digest: str) -> bool:
        in_time = time.monotonic() - started < PRUNE_LIMIT_S
        if in_time:
            backend.delete(blob_key(digest))
        return in_time

    if all(in_parallel(delete, sorted(doomed))):
        for key in [*orphaned, intent]:
            backend.delete(key)


def _await_pruners(backend: Backend, blobs: set[str]) -> None:
    deadline = time.monotonic() + INTENT_LIFE.total_seconds()
    while time.monotonic() < deadline:
        if not any(blobs & doomed for _, doomed, age in _read_all(backend, TRASH) if age < INTENT_LIFE):
            return
        time.sleep(0.2)


def _abandoned_intents(backend: Backend) -> dict[str, set[str]]:
    """Return the intents of pruners that died, for us to finish."""
    return {key: blobs for key, blobs, age in _read_all(backend, TRASH) if age > INTENT_LIFE}


def _live_leases(backend: Backend) -> set[str]:
    leased: set[str] = set()
    for key, blobs, age in _read_all(backend, LEASES):
        if age > LEASE_LIFE:
            backend.delete(key)
        else:
            leased |= blobs
    return leased


def _forget_key(backend: Backend, manifest: Manifest) -> None:
    if manifest.key is None:
        return
    key = index_key(manifest.kind, manifest.key)
    stored = backend.read(key)
    if stored is not None and json.loads(stored.data).get("uri") == manifest.uri:
        backend.delete(key)


def _encode(blobs: set[str]) -> bytes:
    return json.dumps({"created": datetime.now(UTC).isoformat(), "blobs": sorted(blobs)}).encode()


def _read_all(backend: Backend, prefix: str) -> Iterator[tuple[str, set[str], timedelta]]:
    for name in backend.children(prefix):
        key = prefix + name
        stored = backend.read(key)
        if stored is None:  # gone since it was listed
            continue
        try:
            content: dict[str, Any] = json.loads(stored.data)
            age = datetime.now(UTC) - datetime.fromisoformat(content["created"])
            yield key, set(content["blobs"]), age
        except (ValueError, KeyError, TypeError):
            raise StoreError(f"{key} in the artifact store cannot be read; remove it if nothing is running") from None

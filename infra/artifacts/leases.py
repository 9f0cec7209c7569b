"""Who is about to rely on what, and who is about to delete it.

A writer leases the blobs and versions that it is about to name, then looks for deletions under way; a deletion
states its intent, then looks for leases, aliases and manifests. Whichever comes second sees the other: nothing is
relied on by one while the other deletes it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from infra.artifacts.backend import Backend
from infra.artifacts.layout import DELETING, LEASES
from infra.errors import StoreError, VersionExistsError

INTENT_LIFE = timedelta(minutes=4)
"""Whoever deletes is taken for dead this long after its intent: its limit, one request's deadline, and some."""
LEASE_LIFE = timedelta(hours=12)
"""The lease of a writer that was killed protects nothing any longer than this."""
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Claim:
    """Blobs (by hash) and versions (by reference) that somebody relies on, or is about to delete."""

    blobs: frozenset[str] = frozenset()
    versions: frozenset[str] = frozenset()

    def meets(self, other: Claim) -> bool:
        """Return whether both name the same thing."""
        return not (self.blobs.isdisjoint(other.blobs) and self.versions.isdisjoint(other.versions))

    def join(self, other: Claim) -> Claim:
        """Return what either names."""
        return Claim(self.blobs | other.blobs, self.versions | other.versions)

    def to_json(self) -> bytes:
        """Return the claim as it is stored, with the time at which it begins."""
        content = {"blobs": sorted(self.blobs), "versions": sorted(self.versions)}
        return json.dumps({"created": datetime.now(UTC).isoformat()} | content).encode()


@contextmanager
def lease(backend: Backend, holder: str, claim: Claim) -> Iterator[None]:
    """Keep others from deleting what we are about to name; begin when nobody is deleting any of it.

    Args:
        backend: where.
        holder: the random id of whoever names it.
        claim: what it is.
    """
    key = f"{LEASES}{holder}.json"
    backend.create(key, claim.to_json())
    await_deletions(backend, claim)
    try:
        yield
    except VersionExistsError:
        backend.delete(key)
        raise
    backend.delete(key)  # not after other errors: a store that is away would keep us waiting once more


def await_deletions(backend: Backend, claim: Claim) -> None:
    """Wait until nobody who is alive deletes anything of the claim."""
    deadline = time.monotonic() + INTENT_LIFE.total_seconds()
    while time.monotonic() < deadline:
        if not any(claim.meets(doomed) for _, doomed, age in claims(backend, DELETING) if age < INTENT_LIFE):
            return
        time.sleep(POLL_S)


def live_leases(backend: Backend) -> Claim:
    """Return all that somebody relies on by lease; leases of the dead are removed."""
    leased = Claim()
    for key, claim, age in claims(backend, LEASES):
        if age > LEASE_LIFE:
            backend.delete(key)
        else:
            leased = leased.join(claim)
    return leased


def claims(backend: Backend, prefix: str) -> Iterator[tuple[str, Claim, timedelta]]:
    """Yield key, content and age of every claim under a prefix.

    Raises:
        StoreError: if one cannot be read.
    """
    for name in backend.children(prefix):
        key = prefix + name
        stored = backend.read(key)
        if stored is None:  # gone since it was listed
            continue
        try:
            content: dict[str, Any] = json.loads(stored.data)
            age = datetime.now(UTC) - datetime.fromisoformat(content["created"])
            yield key, Claim(frozenset(content["blobs"]), frozenset(content.get("versions", ()))), age
        except (ValueError, KeyError, TypeError, AttributeError):
            raise StoreError(f"{key} in the artifact store cannot be read; remove it if nothing is running") from None

"""Who is about to rely on what, and who is about to delete it: writers and deletions see each other.

A writer leases the blobs and versions that it is about to name, then looks for deletions under way. A deletion states
its intent, then looks for leases, aliases and manifests. Whichever comes second sees the other, so nobody relies on
what another deletes.

Leases and intents expire, because their process may be dead. A deletion looks at its clock before each request, and so
does the holder of a lease before the request that relies on it. We assume that such a request, or its sender, is not
stopped in between for hours (a lease) or minutes (a deletion).

A writer may find a version that has its content already. It claims that version as it did the rest: it leases it, looks
for deletions, and only then looks whether the version is still there. So the version is not about to go when its
reference is returned. Entries of the key index are claimed too: a deletion of an entry that leads to nothing must not
meet a writer that makes the entry lead to something.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any

from infra.artifacts.backend import Backend, clock
from infra.artifacts.ref import DELETING, LEASES
from infra.errors import StoreError, VersionExistsError

log = logging.getLogger(__name__)

DELETION_LIFE = timedelta(minutes=4)
"""A deletion has ended this long after its intent: its limit, the deadline of one request, and a margin."""
INTENT_LIFE = timedelta(minutes=15)
"""By the clock of another machine, which may be ten minutes ahead, a deletion counts as dead this long after."""
LEASE_LIFE = timedelta(hours=12)
"""A lease protects for so long, even if its writer was killed."""
TRUST_LIFE = timedelta(hours=11)
"""A holder relies on its own lease for no longer than this: the clock of a deletion may be ahead of its own."""
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Claim:
    """Blobs (by hash) and versions (by reference) that somebody relies on, or is about to delete."""

    blobs: frozenset[str] = frozenset()
    versions: frozenset[str] = frozenset()
    onward: frozenset[str] = frozenset()
    """References of versions, each with all later ones of its name: numbers that a writer is about to try."""
    keys: frozenset[str] = frozenset()
    """Entries of the key index, by where they stand."""

    def covers(self, uri: str) -> bool:
        """Return whether it names a version."""
        if uri in self.versions:
            return True
        name, _, number = uri.rpartition("@")
        firsts = (each.rpartition("@") for each in self.onward)
        return number.isdecimal() and any(of == name and int(number) >= int(first) for of, _, first in firsts)

    def meets(self, other: Claim) -> bool:
        """Return whether both name the same thing."""
        if not (self.blobs.isdisjoint(other.blobs) and self.keys.isdisjoint(other.keys)):
            return True
        return any(map(self.covers, other.versions)) or any(map(other.covers, self.versions))

    def join(self, other: Claim) -> Claim:
        """Return what either names."""
        return Claim(
            self.blobs | other.blobs,
            self.versions | other.versions,
            self.onward | other.onward,
            self.keys | other.keys,
        )

    def to_json(self) -> bytes:
        """Return the claim as it is stored, with the time at which it begins."""
        content = {field.name: sorted(getattr(self, field.name)) for field in fields(self)}
        return json.dumps({"created": clock.now().isoformat()} | content).encode()


class LeaseOutlivedError(StoreError):
    """The holder of a lease was stopped for so long that what it claims may be gone."""


class Lease:
    """A lease as its holder sees it.

    Args:
        backend: where.
        holder: the random id of the process that names what it claims.
    """

    def __init__(self, backend: Backend, holder: str) -> None:
        self._backend = backend
        self._holder = holder
        self._begun = clock.boottime()
        self._notes: list[str] = []
        self._dead: set[str] = set()

    def cover(self, claim: Claim) -> None:
        """Claim something, besides what is claimed already; return when nobody is deleting any of it."""
        self._notes.append(f"{LEASES}{self._holder}-{len(self._notes)}.json")
        self._backend.create(self._notes[-1], claim.to_json())
        self.await_deletions(claim)

    def await_deletions(self, claim: Claim) -> None:
        """Wait until nobody is deleting any of what is claimed; for a deletion whose process was killed, once."""
        self._dead |= await_deletions(self._backend, claim, self._dead)

    def end(self) -> None:
        """Release all that is claimed."""
        for key in self._notes:
            self._backend.delete(key)

    @property
    def is_outlived(self) -> bool:
        """Whether the holder may have counted as dead, so that others have deleted what it claims."""
        return clock.boottime() - self._begun > TRUST_LIFE.total_seconds()

    def check(self) -> None:
        """Raise LeaseOutlivedError if it is outlived: to be called right before a request that relies on it."""
        if self.is_outlived:
            hours = TRUST_LIFE / timedelta(hours=1)
            raise LeaseOutlivedError(
                f"this process was stopped for more than {hours:.0f} h in the midst of it; try again"
            )


@contextmanager
def lease(backend: Backend, holder: str, claim: Claim) -> Iterator[Lease]:
    """Keep others from deleting what we are about to name; begin when nobody is deleting any of it.

    Args:
        backend: where.
        holder: the random id of the process that names it.
        claim: what it is.

    Yields:
        The lease, to be asked whether it still holds, or to claim more.
    """
    held = Lease(backend, holder)
    held.cover(claim)
    try:
        yield held
    except (VersionExistsError, LeaseOutlivedError):
        held.end()
        raise
    try:
        held.end()  # not after other errors: a store that is away would keep us waiting once more
    except StoreError as error:  # what the lease was for is done
        if not error.passes:
            raise
        hours = LEASE_LIFE / timedelta(hours=1)
        log.warning("a lease stays in the artifact store for %.0f h, and keeps what it names: %s", hours, error)


def await_deletions(backend: Backend, claim: Claim, dead: Collection[str] = ()) -> set[str]:
    """Wait until nobody who is alive deletes anything of the claim.

    A deletion that states its intent after the first look sees the lease, or the manifest, that was written before.

    Args:
        backend: where.
        claim: what somebody is about to rely on.
        dead: keys of intents that were waited for before.

    Returns:
        Keys of the intents that are still there, though their deletions have ended.
    """
    deadline = clock.boottime() + DELETION_LIFE.total_seconds()
    found = claims(backend, DELETING)
    awaited = {key for key, doomed, age in found if key not in dead and age < INTENT_LIFE and claim.meets(doomed)}
    while awaited and clock.boottime() < deadline:
        clock.pause(POLL_S)
        awaited &= {DELETING + name for name in backend.children(DELETING)}
    return awaited


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
            age = clock.now() - datetime.fromisoformat(content["created"])
            named = (content["blobs"], *(content.get(each, ()) for each in ("versions", "onward", "keys")))
            claim = Claim(*map(frozenset, named))
            _check(claim)
        except (ValueError, KeyError, TypeError):
            raise StoreError(f"{key} in the artifact store cannot be read; remove it if nothing is running") from None
        yield key, claim, age


def _check(claim: Claim) -> None:
    """Raise TypeError or ValueError if a claim was altered, and cannot be compared with others."""
    if not all(isinstance(each, str) for each in claim.blobs | claim.versions | claim.onward | claim.keys):
        raise TypeError
    for uri in claim.onward:
        int(uri.rpartition("@")[2])

"""What a place must do before it may hold a store: tried out each time that one is opened."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from uuid import uuid4

from infra.artifacts.backend import Backend
from infra.artifacts.layout import PROBES
from infra.errors import StoreError

CLOCK_LIMIT = timedelta(minutes=5)
"""Leases and intents say when they began: clocks further apart than this could make them end too soon."""


class Enforced(NamedTuple):
    """Which conditions of a write are kept."""

    create: bool
    """Only if nothing is there."""
    replace: bool
    """Only if what is there has not changed."""

    def missing(self) -> str:
        """Return the names of those that are not kept."""
        names = {"create-if-absent (If-None-Match)": self.create, "compare-and-swap (If-Match)": self.replace}
        return " and ".join(name for name, kept in names.items() if not kept)


BOTH = Enforced(create=True, replace=True)


def enforced_conditions(backend: Backend) -> Enforced:
    """Write an object of a random name, with conditions that hold and with some that do not; see what becomes of it.

    Args:
        backend: where; its `create` and `replace` ask for the conditions.
    """
    key = f"{PROBES}{uuid4().hex}"
    create = _creates_once(backend, key)
    try:
        return Enforced(create, _replaces_what_is_unchanged(backend, key))
    finally:
        backend.delete(key)


def check_clock(theirs: datetime, place: str) -> None:
    """Raise StoreError if the clock of the place, just read, and ours are too far apart."""
    ahead = datetime.now(UTC) - theirs
    if abs(ahead) > CLOCK_LIMIT:
        side = "ahead of" if ahead > timedelta() else "behind"
        raise StoreError(
            f"our clock is {abs(ahead).total_seconds() / 60:.0f} minutes {side} that of {place}; leases in the "
            f"artifact store bear {CLOCK_LIMIT.total_seconds() / 60:.0f} at most: set the clock (NTP)"
        )


def _creates_once(backend: Backend, key: str) -> bool:
    first = backend.create(key, b"first") or _holds(backend, key, b"first")  # the answer to our own may be lost
    return first and not backend.create(key, b"second") and _holds(backend, key, b"first")


def _replaces_what_is_unchanged(backend: Backend, key: str) -> bool:
    stored = backend.read(key)
    if stored is None:  # it could not be created
        backend.upload(key, b"first")
        stored = backend.read(key)
    if stored is None:
        return False
    right = backend.replace(key, b"third", stored.tag) or _holds(backend, key, b"third")
    return right and not backend.replace(key, b"fourth", stored.tag) and _holds(backend, key, b"third")


def _holds(backend: Backend, key: str, data: bytes) -> bool:
    stored = backend.read(key)
    return stored is not None and stored.data == data

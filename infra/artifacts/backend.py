"""The place where a store keeps its objects: what it must be able to do, which every opening of a store tries out.

All requests to it take the time from `clock`, and several at once go through `in_parallel`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, Protocol, TypeVar
from uuid import uuid4

from infra.artifacts.ref import PROBES
from infra.errors import StoreNotReadyError

T = TypeVar("T")
R = TypeVar("R")

CHUNK_BYTES = 8 << 20
"""How much of a large object is held in memory at a time, per thread."""
THREADS = 4
"""For small requests, which wait more than they work."""
BODIES = min(8, max(2, os.cpu_count() or 2))
"""For bodies of blobs, each of which is in memory: hashing them keeps a core busy."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A small object as it was read."""

    data: bytes
    tag: str
    """Names this state of the object, for `replace`."""


class Backend(Protocol):
    """Objects under string keys with slashes. Safe to use from several threads and processes at once.

    Every method raises StoreError, in one sentence, when the place cannot be reached or refuses.
    """

    url: str

    def probe(self) -> None:
        """Check that the store is there, lets us in, and keeps its promise of conditional writes."""

    def read(self, key: str) -> Stored | None:
        """Return a small object, or None if there is none."""

    def create(self, key: str, data: bytes) -> bool:
        """Write a small object unless one is there; return whether it was written.

        After an answer was lost on the way, False may mean that our own first attempt won: read it back.
        """

    def replace(self, key: str, data: bytes, tag: str) -> bool:
        """Write a small object if it is still in the state that `tag` names (see `create` on False)."""

    def delete(self, key: str) -> None:
        """Remove an object; it may be gone already."""

    def children(self, prefix: str, after: str = "", most: int | None = None) -> list[str]:
        """Return the sorted names, files and folders, directly under a prefix that ends with a slash.

        Args:
            prefix: where.
            after: only the names that come after this one.
            most: only the first so many; a place that has all of them at once may return all.
        """

    def tags(self, prefix: str) -> dict[str, str]:
        """Return the names directly under a prefix, each with the tag that the list gives it, or with an empty one."""

    def size(self, key: str) -> int | None:
        """Return the size of an object in bytes, or None if there is none."""

    def upload(self, key: str, body: bytes) -> None:
        """Write a blob whole, or not at all; whatever is there is replaced. What arrived is checked."""

    def download(self, key: str, size: int) -> Iterator[bytes]:
        """Yield an object of known size piece by piece."""


def in_parallel(function: Callable[[T], R], items: Iterable[T], threads: int = THREADS) -> list[R]:
    """Return the function's result for each item, in order; the first error ends it all."""
    with ThreadPoolExecutor(threads, thread_name_prefix="artifacts") as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class Clock:
    """What time it is, and waiting: one object for all, so that a test can let hours pass between two calls."""

    def now(self) -> datetime:
        """Return the time of day, in UTC: for what other machines read."""
        return datetime.now(UTC)

    def boottime(self) -> float:
        """Return seconds on a clock that goes on while the machine sleeps: for how long something took."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def awake(self) -> float:
        """Return seconds on a clock that stands still while the machine sleeps: for how long somebody worked."""
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


clock = Clock()
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
    """Raise StoreNotReadyError if the clock of the place, just read, and ours are too far apart.

    It passes: the clock of a machine that has just woken is soon set by NTP.
    """
    ahead = datetime.now(UTC) - theirs
    if abs(ahead) > CLOCK_LIMIT:
        side = "ahead of" if ahead > timedelta() else "behind"
        raise StoreNotReadyError(
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

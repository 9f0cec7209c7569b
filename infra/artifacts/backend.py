"""What the store needs of the place where it keeps its objects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

CHUNK_BYTES = 8 << 20
"""How much of a large object is held in memory at a time, per thread."""


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

    def size(self, key: str) -> int | None:
        """Return the size of an object in bytes, or None if there is none."""

    def upload(self, key: str, body: bytes) -> None:
        """Write a blob whole, or not at all; whatever is there is replaced. What arrived is checked."""

    def download(self, key: str, size: int) -> Iterator[bytes]:
        """Yield an object of known size piece by piece."""

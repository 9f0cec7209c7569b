"""When each process of a run was busy, and with what."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Span(NamedTuple):
    """A stretch of work of one process."""

    role: str
    rank: int
    what: str
    start: float
    """Seconds since the epoch, by the clock of its machine."""
    end: float


class Spans:
    """Keeps one process's spans.

    Args:
        role: of the process.
        rank: in its group.
    """

    def __init__(self, role: str, rank: int) -> None:
        self._role, self._rank = role, rank
        self.kept: list[Span] = []

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Run the block, and keep when it ran."""
        start = time.time()
        try:
            yield
        finally:
            self.kept.append(Span(self._role, self._rank, what, start, time.time()))

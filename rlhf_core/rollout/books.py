"""What the books of chunks are written in: units, leases, what was made, and the sums of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

Stale = Literal["wait", "drop"]
Place = tuple[int, int]
"""Episode and index of a unit."""


class Unit(Protocol):
    """A piece of work for one maker: its place, and how many samples it gives."""

    @property
    def episode(self) -> int: ...  # noqa: D102

    @property
    def index(self) -> int: ...  # noqa: D102

    @property
    def rows(self) -> int: ...  # noqa: D102


C = TypeVar("C", bound=Unit)
M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Lease(Generic[C]):
    """A unit that a maker has."""

    number: int
    """Never given twice in a process: a result is known by it."""
    unit: C
    maker: str


class Made(NamedTuple, Generic[C, M]):
    """A unit that waits to be learnt from."""

    unit: C
    version: int
    """Of the policy that sampled it."""
    result: M


class Books(NamedTuple):
    """How often units were leased, and what became of that."""

    issued: int
    learnt: int
    dropped: int
    """Too old when their episode began to learn; made again."""
    lost: int
    """Their maker died, or was given up; made again."""
    out: int
    waiting: int

    @property
    def balance(self) -> bool:
        """Whether every lease is accounted for."""
        return self.issued == sum(self[1:])

"""The lease queue: which chunks are due, on lease, made, learnt, lost with their maker, or too old to learn from.

It knows neither Ray nor tensors.

An episode is a fixed set of units, numbered from 0; what is learnt in it depends on no maker. A unit is *due* until it
is leased, *out* while a maker has it, *waiting* once it is made, and *learnt* when its episode has been. A maker that
dies makes its units due again (*lost*); a result that waited for too many publications is *dropped* by policy, and its
unit due again.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from rlhf_core.counting import counted, ordinal
from rlhf_core.errors import RlhfError

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


class LeaseCounts(NamedTuple):
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


class MakersLostError(RlhfError):
    """No maker is left, or none answered within the deadline; a new group of actors may mend it."""

    passes = True
    ends_as = "Failed: lost a process"


class LeaseQueue(Generic[C, M]):
    """Leases units to makers as far as staleness and room allow, and hands out episodes that are complete.

    Every method may be called from any thread; `collect` alone waits.

    Args:
        units_of: returns an episode's units, by index; asked once per episode, when it is opened.
        episodes: of the run; none beyond is opened.
        completed: episodes that are learnt, and published, already.
        max_staleness: publications that may lie between a unit's version and the start of the episode that learns it.
        stale_samples: `wait` leases no unit that could become too old; `drop` leases on, and drops what did.
        limit: samples that may be out or waiting for episodes that are not being collected yet; 0 sets none. Some limit
            must be set with `drop`, which would otherwise lease on for ever.
        timeout_setting: what a user raises for a longer wait in `collect`.
    """

    def __init__(
        self,
        units_of: Callable[[int], Sequence[C]],
        *,
        episodes: int,
        completed: int = 0,
        max_staleness: int = 0,
        stale_samples: Stale = "wait",
        limit: int = 0,
        timeout_setting: str = "ppo.cluster.episode_timeout_s",
    ) -> None:
        self._units_of = units_of
        self._episodes, self._completed = episodes, completed
        self._max_staleness, self._stale_samples, self._limit = max_staleness, stale_samples, limit
        self._timeout_setting = timeout_setting
        self._opened = completed
        """First episode whose units nobody has asked for yet."""
        self._sizes: dict[int, int] = {}
        self._due: list[Place] = []
        self._units: dict[Place, C] = {}
        self._out: dict[int, Lease[C]] = {}
        self._made: dict[Place, Made[C, M]] = {}
        self._collecting: int | None = None
        self._numbers = 0
        self._issued = self._learnt = self._dropped = self._lost = 0
        self._failure: Exception | None = None
        self._changed = threading.Condition()

    def lease(self, maker: str) -> Lease[C] | None:
        """Return the first unit that is due, now this maker's; None if there is none, or not yet, or no room for it."""
        with self._changed:
            self._open_episodes()
            if not self._due or not self._has_room_for(self._units[self._due[0]]):
                return None
            unit = self._units[heapq.heappop(self._due)]
            self._numbers += 1
            self._issued += 1
            lease = Lease(self._numbers, unit, maker)
            self._out[lease.number] = lease
            return lease

    def made(self, lease: Lease[C], result: M, *, version: int) -> bool:
        """Take in what a maker made; False if its lease no longer stands, and it is thrown away.

        Args:
            lease: that it was made for.
            result: what was made.
            version: of the policy that sampled it.
        """
        with self._changed:
            if self._out.pop(lease.number, None) is None:
                return False
            unit = lease.unit
            self._made[unit.episode, unit.index] = Made(unit, version, result)
            self._changed.notify_all()
            return True

    def lost(self, maker: str) -> int:
        """Make due again all that a maker has on lease; return how many units that were."""
        with self._changed:
            gone = [lease for lease in self._out.values() if lease.maker == maker]
            for lease in gone:
                del self._out[lease.number]
                heapq.heappush(self._due, (lease.unit.episode, lease.unit.index))
            self._lost += len(gone)
            if gone:
                self._changed.notify_all()
            return len(gone)

    def collect(
        self, episode: int, *, version: int, timeout_s: float, on_progress: Callable[[int, int], None]
    ) -> list[Made[C, M]]:
        """Wait until every unit of an episode is made and none is too old; return them by index.

        They count as waiting until the episode is `learnt`.

        Args:
            episode: the first that is not learnt.
            version: published last: staleness is counted from it.
            timeout_s: longest wait.
            on_progress: called with the units that wait and all of the episode, whenever one has come.

        Raises:
            MakersLostError: if it took longer; the message says who has the units.
            Exception: that `fail` was told.
        """
        deadline, told = time.monotonic() + timeout_s, -1
        with self._changed:
            self._collecting = episode
            self._changed.notify_all()
            while True:
                if self._failure is not None:
                    raise self._failure
                self._open_episodes()
                self._drop_older_than(version - self._max_staleness, episode)
                found = [self._made[place] for place in sorted(self._made) if place[0] == episode]
                if len(found) != told:
                    told = len(found)
                    on_progress(told, self._sizes[episode])
                if told == self._sizes[episode]:
                    return found
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise MakersLostError(self._late(episode, timeout_s))
                self._changed.wait(left_s)

    def learnt(self, episode: int) -> None:
        """Strike off an episode that is learnt, and whose weights are published: what waited for that may be leased."""
        with self._changed:
            for place in [place for place in self._made if place[0] == episode]:
                del self._made[place]
            for place in [place for place in self._units if place[0] == episode]:
                del self._units[place]
            self._learnt += self._sizes.pop(episode)
            self._completed = episode + 1
            self._collecting = None
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Let whoever collects, now or later, know that nothing more will come."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def counts(self) -> LeaseCounts:
        """Return what has become of all leases."""
        with self._changed:
            return LeaseCounts(self._issued, self._learnt, self._dropped, self._lost, len(self._out), len(self._made))

    @property
    def samples_waiting(self) -> int:
        """Samples that are made and not learnt: the depth of the queue."""
        with self._changed:
            return sum(made.unit.rows for made in self._made.values())

    def waiting(self) -> list[Made[C, M]]:
        """Return what is made and not learnt, by place: a training state keeps it."""
        with self._changed:
            return [self._made[place] for place in sorted(self._made)]

    def facts(self) -> dict[str, Any]:
        """Return the counts as JSON holds them; a chunk on lease counts as lost, since a restart leases it again."""
        counts = self.counts()
        return counts._replace(lost=counts.lost + counts.out, out=0)._asdict()

    def restore(self, facts: Mapping[str, Any], waiting: Sequence[Made[C, M]]) -> None:
        """Go on from counts and results of a training state; before anything is leased.

        Args:
            facts: as `facts` returned them.
            waiting: as `waiting` did, of episodes that are not completed.
        """
        with self._changed:
            self._issued, self._learnt, self._dropped, self._lost = (
                int(facts[name]) for name in LeaseCounts._fields[:4]
            )
            for made in waiting:
                while self._opened <= made.unit.episode:
                    self._open_next()
                place = (made.unit.episode, made.unit.index)
                self._due.remove(place)
                self._made[place] = made
            heapq.heapify(self._due)

    def wait_for_change(self, timeout_s: float) -> None:
        """Return when something has changed, such as that more may be leased, or after `timeout_s`."""
        with self._changed:
            self._changed.wait(timeout_s)

    def wake(self) -> None:
        """Have whoever waits for a change look again: there are new weights, or work is to end."""
        with self._changed:
            self._changed.notify_all()

    def state(self) -> tuple[dict[str, Any], list[Made[C, M]]]:
        """Return `facts` and `waiting` as of one moment."""
        with self._changed:
            return self.facts(), self.waiting()

    def _open_episodes(self) -> None:
        while self._opened < self._episodes and self._may_be_opened():
            self._open_next()

    def _may_be_opened(self) -> bool:
        if self._stale_samples == "drop":
            return not self._due
        return self._opened <= self._completed + self._max_staleness

    def _open_next(self) -> None:
        episode = self._opened
        units = list(self._units_of(episode))
        self._opened += 1
        self._sizes[episode] = len(units)
        for unit in units:
            self._units[episode, unit.index] = unit
            heapq.heappush(self._due, (episode, unit.index))

    def _has_room_for(self, unit: C) -> bool:
        if not self._limit or unit.episode == self._collecting:
            return True
        held = [lease.unit for lease in self._out.values()] + [made.unit for made in self._made.values()]
        ahead = sum(each.rows for each in held if each.episode != self._collecting)
        return ahead + unit.rows <= self._limit

    def _drop_older_than(self, version: int, episode: int) -> None:
        for place in [place for place in self._made if place[0] == episode and self._made[place].version < version]:
            del self._made[place]
            heapq.heappush(self._due, place)
            self._dropped += 1

    def _late(self, episode: int, timeout_s: float) -> str:
        holders = sorted({lease.maker for lease in self._out.values() if lease.unit.episode == episode})
        have = f"{', '.join(holders)} had the rest on lease" if holders else "no maker had the rest on lease"
        done = sum(place[0] == episode for place in self._made)
        return (
            f"waited {timeout_s:.0f} s for the {counted(self._sizes[episode], 'chunk')} of episode {ordinal(episode)}, "
            f"and {done} came; {have}; raise {self._timeout_setting}, or look into the cluster's log"
        )

"""What the actors of a run's cluster log and write, in the flow run's log: in order, bounded, without secrets.

A thread reads it every second from where their processes left it, so no actor is asked, and what one said last is there
however it ended. Each line has the actor's own time: Prefect sorts by it.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Collection, Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, NamedTuple

from infra.clusters import output_of
from infra.clusters.actor_log import EVERY_S, LINES, Bound, Record, read_records, told_of
from infra.clusters.output import Written
from infra.settings import secrets
from rlhf_core.escaping import visible
from tasks.run_log import flow_logger
from tasks.showing import only_shows, warn

if TYPE_CHECKING:
    from infra.clusters import ClusterRecord

WHAT = "what the run's actors say"
LOOK_S = 1.0
ACTOR_LINES, RUN_LINES = 2_000, 10_000
"""At most so many lines of one actor and level, and of all actors, in one run's log."""
_LATE_S = 30.0
"""What is read later than so much after its time is shown at a later one: `rlhf run` looks back no further."""
_STEP_S = 2e-6
"""Between two lines of a process: the server's times have microseconds."""
_JOIN_S = 10.0
_ALL = "the actors"
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


class Line(NamedTuple):
    """One entry of the run's log."""

    created: float
    level: int
    text: str


class ActorLines:
    """Turns what processes have written into lines of a log.

    Args:
        hidden: what no line may show.
        where: tells a person where the rest is.
    """

    def __init__(self, hidden: Collection[str], where: str) -> None:
        self._hidden, self._where = sorted(hidden, key=len, reverse=True), where
        self._names: dict[str, str] = {}
        """Of actors, by process."""
        self._last: dict[tuple[str, bool], float] = {}
        """Time of the last line of each process and stream."""
        self._stretches: dict[tuple[str, int], Bound] = {}
        self._totals: dict[tuple[str, int], Bound] = {}
        self._run = Bound(RUN_LINES)
        self._full: set[Bound] = set()
        """Those that were told to be."""

    def lines(self, written: Sequence[Written], now: float) -> list[Line]:
        """Return the lines for what was written since the last call, in order: of a process its own, then by time.

        Args:
            written: what was written.
            now: the time before it was read.
        """
        found = [line for each in written for line in self._of(each, now)]
        for (actor, level), stretch in self._stretches.items():
            if count := stretch.left_out(now):
                found.append(self._told(now, level, actor, count))
        return sorted(found, key=lambda line: line.created)

    def rest(self, now: float) -> list[Line]:
        """Return the lines for what was left out and is not told yet."""
        bounds = [*self._stretches.items(), *self._totals.items(), ((_ALL, logging.WARNING), self._run)]
        counts = [(each, bound.left_out(math.inf)) for each, bound in bounds]
        return [self._told(now, level, actor, count) for (actor, level), count in counts if count]

    def _of(self, written: Written, now: float) -> list[Line]:
        records = list(read_records(written.lines, is_error=written.is_error))
        for record in records:
            if record.actor:
                self._names[written.process] = record.actor
        actor = self._names.get(written.process, f"process {written.process}")
        if count := written.bytes_left_out:
            records.insert(0, Record("", logging.WARNING, 0.0, told_of(count, "byte"), False))
        lines: list[Line] = []
        stream = (written.process, written.is_error)
        for record, at in zip(records, _times(records, now), strict=True):
            if not self._takes(actor, record, now):
                continue
            created = max(min(max(at, now - _LATE_S), now), self._last.get(stream, 0.0) + _STEP_S)
            self._last[stream] = created
            lines.append(Line(created, record.level, self._clean(actor, record.text)))
            lines += self._full_after(actor, record.level, created + _STEP_S / 2)
        return lines

    def _takes(self, actor: str, record: Record, now: float) -> bool:
        key = (actor, record.level)
        if not record.is_bounded and not self._stretches.setdefault(key, Bound(LINES, EVERY_S)).takes(now):
            return False
        return self._totals.setdefault(key, Bound(ACTOR_LINES)).takes(now) and self._run.takes(now)

    def _full_after(self, actor: str, level: int, now: float) -> list[Line]:
        """Return what is to be said once a bound of the whole run is reached."""
        found = []
        for bound, whose in (
            (self._totals[actor, level], f"{actor}: no more lines of this level"),
            (self._run, f"{_ALL}: no more lines"),
        ):
            if bound.is_full and bound not in self._full:
                self._full.add(bound)
                text = f"{whose} are shown here, for there were many; see {self._where}"
                found.append(Line(now, logging.WARNING, text))
        return found

    def _told(self, now: float, level: int, actor: str, count: int) -> Line:
        return Line(now, level, self._clean(actor, told_of(count)))

    def _clean(self, actor: str, text: str) -> str:
        text = visible(_COLOURS.sub("", text))
        for secret in self._hidden:
            text = text.replace(secret, "***")
        return f"{actor}: {text}"


def _times(records: Sequence[Record], now: float) -> list[float]:
    """Return when each was said: what has no time was said before what follows it."""
    found, at = [], now
    for record in reversed(records):
        at = record.created or at
        found.append(at)
    return found[::-1]


class _Follower:
    """Reads a cluster's output in a thread, and writes it into the log of the flow run that began it."""

    def __init__(self, record: ClusterRecord) -> None:
        self.mark = record.mark
        self._output = output_of(record)
        self._lines = ActorLines(secrets(), record.logs)
        self._logger = flow_logger()
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._follow,), name="actors' lines", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Write what is there, and then no more."""
        self._is_over.set()
        self._thread.join(_JOIN_S)

    def _follow(self) -> None:
        try:
            while not self._is_over.wait(LOOK_S):
                self._look()
            self._look(last=True)
            self._write(self._lines.rest(time.time()))
        except Exception as error:  # it is only shown
            warn(WHAT, error)
        finally:
            self._output.close()

    def _look(self, *, last: bool = False) -> None:
        now = time.time()
        self._write(self._lines.lines(self._output.read(last=last), now))

    def _write(self, lines: Sequence[Line]) -> None:
        adapter = self._logger
        logger, extra = getattr(adapter, "logger", adapter), getattr(adapter, "extra", None)
        for created, level, text in lines:
            if logger.isEnabledFor(level):
                record = logger.makeRecord(logger.name, level, __file__, 0, "%s", (text,), None, extra=extra)
                record.created, record.msecs = created, created % 1 * 1000
                logger.handle(record)


_FOLLOWERS: dict[str, _Follower] = {}


@only_shows(WHAT)
def follow_actors(record: ClusterRecord) -> None:
    """Have this flow run's log show what the actors of its cluster say, until `leave_actors`."""
    before = _FOLLOWERS.get(record.name)
    if before is not None and before.mark == record.mark:
        return
    leave_actors(record.name)
    _FOLLOWERS[record.name] = _Follower(record)


@only_shows(WHAT)
def leave_actors(name: str) -> None:
    """Show what the actors of a run's cluster have said, and then no more."""
    if follower := _FOLLOWERS.pop(name, None):
        follower.end()

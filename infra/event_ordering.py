"""How the Prefect server keeps its events in order after it was killed, and does not count its absence as silence.

The server evaluates its automations on events that follow one another: a crash follows the run's start. Prefect's own
ordering remembers in memory which events it has seen. A server that was killed and started again therefore parks the
first event of each run for a quarter of an hour, because it waits for an earlier one; and a second kill forgets what
was parked. Here an event that came before this server began is past, parked events are in the database, and no event
waits longer than half a minute for another one.

An automation may wait for signs of life, and each sign starts the waiting again. When the server comes back, such an
automation would take every run for dead, because no sign came while nobody listened. So its time starts again when the
server does, and when the server was stopped for a while, as when a laptop sleeps.

The server loads this module when PREFECT_SERVER_EVENTS_CAUSAL_ORDERING names it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import UUID

import sqlalchemy as sa
from prefect.logging import get_logger
from prefect.server.database import PrefectDBInterface, provide_database_interface
from prefect.server.events import triggers
from prefect.server.events.ordering import EventArrivedEarly, MaxDepthExceeded, memory
from prefect.server.events.schemas.automations import EventTrigger, Posture
from prefect.types._datetime import now

from infra.server_database import (
    ask_later_while_it_is_away,
    check_schemas_once,
    collect_in_a_thread,
    count_requests_alone,
    look_less_often,
    write_in_turn,
)

if TYPE_CHECKING:
    from prefect.server.events.schemas.events import Event, ReceivedEvent
    from prefect.types._datetime import DateTime
    from sqlalchemy.ext.asyncio import AsyncSession

LEADER_S = 30.0
"""How long an event waits for the one that it follows. Within one server that is a matter of seconds."""
STOPPED_S = 60.0
"""The server looks at its automations every few seconds: if it has not for so long, it was away."""
GRACE_S = 120.0
"""Time for a sign of life once the server is back: flows give one every 30 s, and find the server within 10."""
_TRIES = 5
_BEGAN = now("UTC")
_LOOKS_FOR_SILENCE = ContextVar("_LOOKS_FOR_SILENCE", default=False)


class CausalOrdering(memory.CausalOrdering):
    """The order of events within one server, as Prefect keeps it, with a memory that outlives the server."""

    _instances: dict[str, memory.CausalOrdering] = {}  # noqa: RUF012 - Prefect's own, which the base keeps for itself
    _locks: dict[str, asyncio.Lock] = {}  # noqa: RUF012

    def __init__(self, scope: str) -> None:
        if getattr(self, "_initialized", False):  # there is one for each scope
            return
        super().__init__(scope)
        self._tried: dict[UUID, int] = {}
        self._recalled = False

    async def event_has_been_seen(self, event: UUID | Event) -> bool:
        """Whether this server has evaluated an event; Prefect asks before each one, so listening begins here."""
        await LISTENING.note()
        await self._recall()
        return await super().event_has_been_seen(event)

    async def wait_for_leader(self, event: ReceivedEvent) -> None:
        """Return once an event may be evaluated.

        Raises:
            EventArrivedEarly: if the one that it follows is still to come; the event is parked until then.
        """
        leader = event.follows
        if leader is None or leader == event.id or now("UTC") - event.received >= timedelta(seconds=LEADER_S):
            return
        known = await self.event_has_been_seen(leader) or await self.event_has_started_processing(leader)
        if not known and await _is_past(leader):
            return
        try:
            await super().wait_for_leader(event)
        except EventArrivedEarly:
            if not await self.event_has_been_seen(leader):  # or it came while this one was parked, and looked for none
                raise

    async def record_follower(self, event: ReceivedEvent) -> None:
        """Park an event; one that comes again is parked once."""
        db = provide_database_interface()
        row = {
            "scope": self.scope,
            "leader_event_id": event.follows,
            "follower_event_id": event.id,
            "received": event.received,
            "follower": event,
        }
        async with db.session_context(begin_transaction=True) as session:
            await session.execute(db.queries.insert(db.AutomationEventFollower).values(row).on_conflict_do_nothing())
        await super().record_follower(event)

    async def forget_follower(self, follower: ReceivedEvent) -> None:
        """Forget an event that has been evaluated, if it was parked."""
        if follower.id not in self._waitlist:  # as nearly all: a write for each would keep others from the database
            return
        db = provide_database_interface()
        parked = db.AutomationEventFollower
        this = sa.delete(parked).where(parked.scope == self.scope, parked.follower_event_id == follower.id)
        async with db.session_context(begin_transaction=True) as session:
            await session.execute(this)
        self._tried.pop(follower.id, None)
        await super().forget_follower(follower)

    async def get_lost_followers(self) -> list[ReceivedEvent]:
        """Return the events that have waited long enough, in the order in which they occurred.

        They stay parked until they are evaluated, so that a server which is killed meanwhile finds them again.
        """
        await self._recall()
        until = now("UTC") - timedelta(seconds=LEADER_S)
        lost = [self._events[event_id] for event_id, received in self._waitlist.items() if received <= until]
        for event in [each for each in lost if self._tried.get(each.id, 0) >= _TRIES]:
            get_logger(__name__).error("Event %r (%s) is given up: it cannot be evaluated", event.event, event.id)
            await self.forget_follower(event)
            lost.remove(event)
        for event in lost:
            self._tried[event.id] = self._tried.get(event.id, 0) + 1
        return sorted(lost, key=lambda event: event.occurred)

    async def _recall(self) -> None:
        """Load, once, what a former server had parked."""
        if self._recalled:
            return
        db = provide_database_interface()
        if db.dialect.name == "sqlite":
            collect_in_a_thread()
        parked = db.AutomationEventFollower
        async with db.session_context() as session:
            found = (
                (await session.execute(sa.select(parked.follower).where(parked.scope == self.scope))).scalars().all()
            )
        for event in found:
            await super().record_follower(event)
        self._recalled = True


class Listening:
    """Whether the server was there all the time; if it was not, signs of life get more time."""

    def __init__(self) -> None:
        self._latest = 0.0
        self._lock: asyncio.Lock | None = None

    async def note(self) -> None:
        """Note that the server listens: before it looks at an event, and before it looks for silence.

        It does not listen until its automations are loaded.
        """
        if time.time() - self._latest > STOPPED_S:
            self._lock = self._lock or asyncio.Lock()
            async with self._lock:
                if time.time() - self._latest > STOPPED_S:  # nobody else has done it meanwhile
                    if not await _begin_anew():
                        return
                    self._latest = time.time()
        self._latest = time.time()


LISTENING = Listening()


async def _begin_anew() -> bool:
    """Give automations that wait for signs of life more time, if little is left; False if none is loaded yet."""
    watching = [trigger.id for trigger in triggers.triggers.values() if _waits_for_signs(trigger)]
    if not watching:
        return bool(triggers.triggers)
    db = provide_database_interface()
    bucket, until = db.AutomationBucket, now("UTC") + timedelta(seconds=GRACE_S)
    late = sa.update(bucket).where(bucket.trigger_id.in_(watching), bucket.end < until).values(end=until)
    async with db.session_context(begin_transaction=True) as session:
        await session.execute(late)
    return True


def _waits_for_signs(trigger: EventTrigger) -> bool:
    return trigger.posture == Posture.Proactive and bool(trigger.after & trigger.expect)


async def _is_past(leader: UUID) -> bool:
    """Whether an event belongs to the time before this server: the one that evaluated it, or died with it, is gone."""
    db: PrefectDBInterface = provide_database_interface()
    received = sa.select(db.Event.id).where(db.Event.id == leader, db.Event.received < _BEGAN)
    # A run's change of state is told by an event of the same id, which a killed server may not have written down.
    changed = sa.select(db.FlowRunState.id).where(db.FlowRunState.id == leader, db.FlowRunState.timestamp < _BEGAN)
    async with db.session_context() as session:
        return any([await session.scalar(query) is not None for query in (received, changed)])


@asynccontextmanager
async def automations_session(begin_transaction: bool = False) -> AsyncIterator[AsyncSession]:
    """Give a session for automations; one in which they are evaluated takes the lock before it reads.

    Prefect's own session reads first. If others write meanwhile, sqlite then refuses its write at once, and an event
    that was refused four times is lost: a run then counted as not begun. And when silence has made an automation act,
    what the action brings may be evaluated before it is written down that it acted. It then acts again: a run was
    scheduled twice.

    Args:
        begin_transaction: whether an event is evaluated.
    """
    locks = begin_transaction or _LOOKS_FOR_SILENCE.get()
    db = provide_database_interface()
    async with db.session_context(begin_transaction=locks, with_for_update=locks) as session:
        if locks and db.dialect.name != "sqlite":
            await session.execute(sa.text("SET LOCAL idle_in_transaction_session_timeout = '30s'"))  # if this host dies
            await session.execute(sa.text(f"LOCK TABLE {db.AutomationBucket.__tablename__} IN EXCLUSIVE MODE"))
        yield session


_evaluate_event = triggers.reactive_evaluation
_evaluate_silence = triggers.proactive_evaluation
_evaluate = triggers.evaluate_proactive_triggers


async def reactive_evaluation(event: ReceivedEvent, depth: int = 0) -> None:
    """Evaluate an event, as Prefect does, but once in a server's life.

    A parked event is found twice: with the one that it follows, and because it has waited too long. Evaluated again, it
    would begin the waiting for signs of life anew after they had come, and the run would be scheduled twice. One that
    cannot be evaluated stays parked, and keeps no other from its turn.
    """
    ordering = CausalOrdering("triggers")
    if await ordering.event_has_been_seen(event):
        await ordering.forget_follower(event)
        return
    try:
        await _evaluate_event(event, depth)
    except (EventArrivedEarly, MaxDepthExceeded):
        raise
    except Exception:
        if event.id not in ordering._waitlist:  # its message comes again
            raise
        get_logger(__name__).exception("Event %r (%s) stays parked: it could not be evaluated", event.event, event.id)


async def proactive_evaluation(trigger: EventTrigger, as_of: DateTime) -> DateTime:
    """Look for silence in what an automation waits for, as Prefect does, but under the lock."""
    token = _LOOKS_FOR_SILENCE.set(True)
    try:
        return await _evaluate_silence(trigger, as_of)
    finally:
        _LOOKS_FOR_SILENCE.reset(token)


async def evaluate_proactive_triggers() -> None:
    """Look for silence, as Prefect does, once it is known whether anybody listened."""
    await LISTENING.note()
    await _evaluate()


triggers.reactive_evaluation = reactive_evaluation
triggers.proactive_evaluation = proactive_evaluation
triggers.evaluate_proactive_triggers = evaluate_proactive_triggers
vars(triggers)["automations_session"] = automations_session
look_less_often()
write_in_turn()
ask_later_while_it_is_away()
check_schemas_once()
count_requests_alone()  # before runs come back to a server that was killed, each with its sockets

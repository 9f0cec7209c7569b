"""One process for a run, and one run at a time of a deployment that asks for it: two locks in the artifact store.

Prefect starts a run a second time when it takes the run for crashed: its machine slept, its server was away, a clock
was set. Prefect cannot know whether the first process still works. So each start takes the run's lock first. A second
start that finds the first process at work waits. If the first finishes, the run is done: the second leaves and reports
nothing to the server, so that what the first reported stands. If the first ends early, the second goes on from the last
commit. A run that had done its work and could not report it is not done again.

A deployment with the tag `one-at-a-time` has a lock of its own. A run holds that lock from its start until it has ended
for good, also while no process works on the run, as when it waits for its restart. A run that is due meanwhile asks the
holder's process and the server whether the holder goes on; if so, it is skipped, and a sentence says so. A run that
waits for a person's approval has trained and judged: it leaves the deployment to the next, for good.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from prefect import State
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Completed

from infra.artifacts.backend import clock
from infra.artifacts.locks import (
    DEPLOYMENT_LOCK,
    GAP_S,
    RUN_LOCK,
    Held,
    How,
    Life,
    Lock,
    Observer,
    Record,
    Seen,
    new_record,
)
from infra.errors import LockLostError, StoreError
from infra.services.automations import LOST_AFTER_S, RESTARTING, SKIPPED
from infra.services.prefect_yaml import ONE_AT_A_TIME
from infra.settings import settings
from tasks.context import is_inner, open_context
from tasks.deadlines import in_time
from tasks.nights import missed
from tasks.progress import say
from tasks.taken_over import HELD, leave

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

    from infra.artifacts import ArtifactStore

P = ParamSpec("P")
R = TypeVar("R")

POLL_S = 2.0
WAIT_S = 24 * 3600.0
"""Longest wait of a second start for a first that is at work. Then the second leaves, and the first goes on."""
CRASH_S = 120.0
"""A run that has been Crashed for so long, and not Restarting, is not started again: nothing on the server does it."""
SILENCE_S = LOST_AFTER_S + 300.0
"""A run that counts as running, and whose process is gone, has crashed within this time, or nothing will report it."""
_LEFT = "left-its-deployment"
"""Name of the record that a run has: Prefect forgets what was asked of a run that crashes later."""


def one_process(function: Callable[P, R]) -> Callable[P, R]:
    """Let one process at a time work on a flow's run; to stand right under `in_one_sentence`.

    Flows that are called inside a run are part of it, and take nothing. Neither does a call outside of any run.
    """

    @wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        run = _outermost_run()
        if run is None:
            return function(*args, **kwargs)
        store = open_context().store
        start = _Start(store.lock(f"{RUN_LOCK}{run.id}"), run)
        begun = start.begin()
        if isinstance(begun, State):
            return begun  # type: ignore[return-value]
        return _work(begun, store, run, lambda: function(*args, **kwargs), is_first=start.is_first)

    return alone


def _outermost_run() -> FlowRun | None:
    """Return the run that goes on here, unless it is part of another."""
    context = FlowRunContext.get()
    run = None if context is None else context.flow_run
    return None if run is None or is_inner(run) or HELD.get() is not None else run


def _work(held: Held, store: ArtifactStore, run: FlowRun, function: Callable[[], R], *, is_first: bool) -> R:
    """Call a flow's function with the lock, and release it however that ends; its time counts from when it may work."""
    token = HELD.set(held)
    how: How = "stopped"
    said: str | None = None
    try:
        deployment = _deployment_lock(store, run)
        if deployment is not None and store.recall(str(run.id), _LEFT) is not None:
            deployment = None
        reason = missed(run) if is_first else None
        if reason is None and deployment is not None:
            reason = _Turn(store, deployment, run).refused()
        if reason is not None:
            how, said = "failed", reason
            return Cancelled(name=SKIPPED, message=reason)  # type: ignore[return-value]
        result = in_time("the flow", settings().flow_timeout_s, "RLHF_FLOW_TIMEOUT_S", function)
    except Exception:
        how = "failed"
        _leave_if_lost(held)  # then it may have failed for that, and another goes on
        raise
    else:
        how, said = _ending(result)
        if deployment is not None:
            _give_back(deployment, str(run.id), how, said)
        return result
    finally:
        HELD.reset(token)
        held.release(how, said)
        if held.is_lost and how == "completed":
            leave("another process has gone on with the run, and reports its end")


def _ending(result: object) -> tuple[How, str | None]:
    if isinstance(result, State):
        return "completed" if result.is_completed() else "failed", result.message
    return "completed", None


def _leave_if_lost(held: Held) -> None:
    try:
        held.check()
    except LockLostError as error:
        leave(str(error))
    except StoreError:  # what is raised already says more
        return


class _Start:
    """A start of a run that wants its lock."""

    def __init__(self, lock: Lock, run: FlowRun) -> None:
        self._lock, self._run = lock, run
        self._observer = Observer()
        self._begun = clock.boottime()
        self._waited_for: str | None = None
        """Incarnation of the process that this start has found at work."""
        self.is_first = False
        """Whether no process has had the lock before; Prefect does not count the start of a resumed run."""

    def begin(self) -> Held | State[Any]:
        """Return the lock once it is ours, or the state of a run that is done already.

        Raises:
            Abort: another process works on the run, and has come to its end, or has not for a day.
            StoreError: if the store cannot be used.
        """
        while True:
            seen, life = self._look()
            if seen is not None and life is Life.ENDED and (done := self._done(seen.record)) is not None:
                return done
            if life in {Life.ENDED, Life.DEAD}:
                held = self._lock.take(seen, self._record(seen))
                if held is not None:
                    self.is_first = seen is None
                    self._say_how_it_begins(seen)
                    return held
            elif seen is not None:
                self._say_that_it_waits(seen.record, life)
            if clock.boottime() - self._begun > WAIT_S:
                leave(f"the process that works on it has not ended within {WAIT_S / 3600:.0f} h")
            clock.pause(POLL_S)

    def _look(self) -> tuple[Seen | None, Life]:
        """Return the lock and what is known of its holder; while a first works, a store that is away ends no wait."""
        try:
            seen = self._lock.look()
        except StoreError as error:
            if self._waited_for is None or not error.passes:
                raise
            return None, Life.UNKNOWN
        return seen, self._observer.judge(seen)

    def _record(self, seen: Seen | None) -> Record:
        before: dict[str, Any] = {}
        if seen is not None:
            before = {"since": seen.record.since, "worked_s": seen.record.worked_s}
        return new_record(str(self._run.id), self._run.name, **before)

    def _done(self, record: Record) -> State[Any] | None:
        """Return the state of a run that has done its work; None if some is left."""
        ended = record.ended
        if ended is None:
            return None
        if ended.how != "stopped" and record.incarnation == self._waited_for:
            leave(f"{record.holder}, which worked on it, has come to its end ({ended.how})")
        if ended.how != "completed":
            return None
        say("run", "has done its work already, and is not done again; start a new run to do it again")
        return Completed(message=ended.said)

    def _say_that_it_waits(self, record: Record, life: Life) -> None:
        if self._waited_for == record.incarnation:
            return
        self._waited_for = record.incarnation
        if life is Life.LIVES:
            say("run", f"{record.holder} works on this run and lives; this second start waits for its end")
        else:
            say("run", f"{record.holder} worked on this run; whether it still does is seen within two minutes")

    def _say_how_it_begins(self, seen: Seen | None) -> None:
        if seen is not None and seen.record.ended is None:
            say("run", f"goes on from its last commit: {seen.record.holder} has ended without a word")


def _deployment_lock(store: ArtifactStore, run: FlowRun) -> Lock | None:
    """Return the lock of the run's deployment, if it has one."""
    if run.deployment_id is None or ONE_AT_A_TIME not in run.tags:
        return None
    return store.lock(f"{DEPLOYMENT_LOCK}{run.deployment_id}")


def leave_deployment(run: FlowRun) -> None:
    """Let the next run of a deployment begin, also while this one waits for a person, and never take a turn again.

    What is left to a run that calls this must be no harm beside another.

    Raises:
        StoreError: if the store does not answer.
    """
    store = open_context().store
    lock = _deployment_lock(store, run)
    store.record(str(run.id), _LEFT, "has it left its deployment to the next run?", answer=True)
    if lock is not None:
        _free(lock, str(run.id), "stopped", None)


def _give_back(lock: Lock, run_id: str, how: How, said: str | None) -> None:
    """Free a deployment whose run has ended; where that fails, the next run finds out what became of this one."""
    with suppress(StoreError):
        _free(lock, run_id, how, said)


def _free(lock: Lock, run_id: str, how: How, said: str | None) -> None:
    seen = lock.look()
    if seen is not None and seen.record.run == run_id and seen.record.ended is None:
        lock.swap(seen, seen.record.as_ended(how, said))


class Fate(Enum):
    """What became of the run that holds a deployment."""

    GOES_ON = "goes on"
    OVER = "over"
    UNCLEAR = "unclear"


class _Turn:
    """A run that wants its deployment for itself."""

    def __init__(self, store: ArtifactStore, lock: Lock, run: FlowRun) -> None:
        self._store, self._lock, self._run = store, lock, run
        self._holder: _Holder | None = None

    def refused(self) -> str | None:
        """Return why the run is skipped; None once the deployment is its own.

        Raises:
            httpx.HTTPError: if the server is away, and must be asked what became of the holder.
            StoreError: if the store does not answer.
        """
        while True:
            seen = self._lock.look()
            if seen is not None and seen.record.ended is None:
                if seen.record.run == str(self._run.id):
                    return None
                fate = self._fate(seen.record)
                if fate is Fate.GOES_ON:
                    return _sentence(seen.record)
                if fate is Fate.UNCLEAR:
                    clock.pause(POLL_S)
                    continue
            if self._lock.swap(seen, new_record(str(self._run.id), self._run.name, by_process=False)):
                return None

    def _fate(self, record: Record) -> Fate:
        if self._holder is None or self._holder.run_id != record.run:
            self._holder = _Holder(self._store, record.run)
            first = True
        else:
            first = False
        fate = self._holder.fate()
        if first and fate is Fate.UNCLEAR:
            say("run", f"{record.holder} has this deployment; waits to see whether it is started again or is over")
        return fate


def _sentence(record: Record) -> str:
    return (
        f"skipped: the run {record.run_name!r} of this deployment, begun at {record.since:%Y-%m-%d %H:%M} UTC, is not "
        f"done yet, and the deployment has one run at a time (tag {ONE_AT_A_TIME!r}); run this when that one is done"
    )


class _Holder:
    """The run that holds a deployment, as another run sees it at each look."""

    def __init__(self, store: ArtifactStore, run_id: str) -> None:
        self.run_id = run_id
        self._lock = store.lock(f"{RUN_LOCK}{run_id}")
        self._observer = Observer()
        self._state: object = None
        self._looked = clock.boottime()
        self._unchanged_s = 0.0
        """For how long its state was seen to stay the same; a time in which this process slept counts little."""

    def fate(self) -> Fate:
        """Return what became of the run, as far as it is known by now."""
        life = self._observer.judge(self._lock.look())
        if life is Life.LIVES:
            return Fate.GOES_ON  # whatever the server says of it
        run = _read_run(self.run_id)  # the client waits for a server that is away
        state = None if run is None else run.state
        self._count(None if state is None else state.id)
        return self._of_state(state, gone=life is not Life.UNKNOWN)

    def _of_state(self, state: State[Any] | None, *, gone: bool) -> Fate:
        """Return what a state means, of a run whose process is gone, or elsewhere and not yet known."""
        if state is None or (state.is_final() and not state.is_crashed()):
            return Fate.OVER if gone else Fate.UNCLEAR
        if state.is_crashed() and state.name != RESTARTING:
            return Fate.OVER if gone and self._unchanged_s > CRASH_S else Fate.UNCLEAR
        waits = state.is_scheduled() or state.is_paused() or state.name == RESTARTING
        if waits or not gone:
            return Fate.GOES_ON
        return Fate.OVER if self._unchanged_s > SILENCE_S else Fate.UNCLEAR

    def _count(self, state: object) -> None:
        now = clock.boottime()
        step, self._looked = min(now - self._looked, GAP_S), now
        self._unchanged_s = self._unchanged_s + step if state == self._state else 0.0
        self._state = state


def _read_run(run_id: str) -> FlowRun | None:
    """Return a run as the server has it; None if it was deleted."""
    with get_client(sync_client=True) as client:
        try:
            return client.read_flow_run(run_id)  # type: ignore[arg-type]
        except ObjectNotFound:
            return None

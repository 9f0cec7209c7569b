"""One process for a run, and one run at a time of the deployments that ask for it (docs/adr/0027-one-process.md).

A run may be started a second time while its process lives: it was stopped, or asleep with the machine, or the server
was away, and the run counted as crashed. The second process then waits for the first, and works only if that ends
before its work does.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from prefect import State
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound, TerminationSignal
from prefect.logging.handlers import APILogWorker
from prefect.states import Cancelled, Completed
from prefect.types._datetime import now

from infra.artifacts.exclusive import POLL_S, ExclusiveLock, Lock, LockLostError
from infra.errors import StoreError
from infra.services.automations import RESTARTING, RESUMES, SKIPPED
from tasks.context import open_context
from tasks.sentences import run_logger

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

    from infra.artifacts import ArtifactStore

P = ParamSpec("P")
R = TypeVar("R")

ONE_AT_A_TIME = "one-at-a-time"
"""Tag of the deployments of which one run goes on at a time; another one that is due meanwhile is skipped."""
_CRASH_PASSES = timedelta(minutes=15)
"""A crashed run that may be started again, and was not after so long, is not any more."""
_LOST_EXIT = 0
"""A process that lost its run leaves as if it had done its work: the run goes on in another."""
_held: ExclusiveLock | None = None


def one_process(function: Callable[P, R]) -> Callable[P, R]:
    """Let a flow's function work in one process for each run, and skip a run whose deployment has another one.

    For the outermost flow alone; one that is called by another belongs to its process. Outside Prefect it does nothing.
    """

    @wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        run = _outermost_run()
        if run is None:
            return function(*args, **kwargs)
        store = open_context().store
        with _lock_of_run(store, run) as lock:
            if (told := _await_turn(lock)) is not None:
                return told  # type: ignore[return-value]
            if (skipped := _skipped(store, run)) is not None:
                return skipped  # type: ignore[return-value]
            result = function(*args, **kwargs)
            _note(lock, result)
            return result

    return alone


def check_still_ours() -> None:
    """End this process if another has taken over its run: to be called before a result is stored or promoted."""
    if _held is not None:
        try:
            _held.check()
        except LockLostError as error:
            _leave(error)


def _outermost_run() -> FlowRun | None:
    context = FlowRunContext.get()
    run = None if context is None else context.flow_run
    return None if run is None or run.parent_task_run_id is not None else run


@contextmanager
def _lock_of_run(store: ArtifactStore, run: FlowRun) -> Iterator[ExclusiveLock]:
    """Give the run's lock. Its holder has it until its process ends: only then has it told the server everything."""
    global _held  # noqa: PLW0603 - one run for each process
    _held = store.lock(f"run-{run.id}", str(run.id))
    try:
        yield _held
    finally:
        _held.end()
        _held = None


def _await_turn(lock: ExclusiveLock) -> State[Any] | None:
    """Return None once this process is the run's, or what the one before it has made of the run."""
    former, waiting = lock.take(), False
    while not lock.is_held:
        if former is not None and not waiting:
            waiting = True
            run_logger().warning(
                "This run is at work in process %d already, which began it at %s: this one waits for its end.",
                former.holder.process.pid,
                f"{former.holder.since:%Y-%m-%d %H:%M} UTC",
            )
        try:
            time.sleep(POLL_S)
            former = lock.take()
        except TerminationSignal:
            _pass_on(former)
            raise
    lock.keep(_leave)
    if not waiting:
        return None
    if former is not None and former.outcome is not None:
        run_logger().info("The other process has done the run's work.")
        return State.model_validate(json.loads(former.outcome))
    run_logger().warning("The other process has ended before its work did: this one goes on.")
    return None


def _pass_on(former: Lock | None) -> None:
    """Tell the process that does the run's work to end, as this one was told, which only waits for it."""
    if former is not None and (process := former.holder.process.process()) and former.holder.is_here:
        process.terminate()


def _note(lock: ExclusiveLock, result: Any) -> None:
    """Write down the state in which a run ends, to be told again by a second process of it."""
    state = result if isinstance(result, State) else Completed()
    try:
        lock.leave(json.dumps({"type": state.type.value, "name": state.name, "message": state.message}))
    except LockLostError as error:
        _leave(error)
    except StoreError as error:  # the work is done
        run_logger().warning("a second process of this run, if there is one, is not told how it ended: %s", error)


def _leave(error: LockLostError) -> None:
    """End this process at once, and leave the run alone: it goes on in another one."""
    run_logger().warning("%s; this process ends, and the run goes on there.", error)
    _flush_logs()
    os._exit(_LOST_EXIT)


def _flush_logs() -> None:
    with suppress(Exception):  # the server may be away
        APILogWorker.drain_all(timeout=5)


def _skipped(store: ArtifactStore, run: FlowRun) -> State[Any] | None:
    """Return the state of a run that is skipped, as another one of its deployment goes on; None if it may work."""
    if ONE_AT_A_TIME not in run.tags or run.deployment_id is None:
        return None
    lock = store.lock(f"deployment-{run.deployment_id}", str(run.id))
    found = lock.take(lambda other: other.holder.who == str(run.id) or _has_ended(store, other))
    if lock.is_held or found is None:
        return None
    name = _name_of(found.holder.who)
    message = (
        f"skipped: the run {name} of the same deployment goes on since {found.holder.since:%Y-%m-%d %H:%M} UTC; "
        f"if it is stuck, end it with `prefect flow-run cancel {found.holder.who}`"
    )
    run_logger().warning("%s", message)
    return Cancelled(name=SKIPPED, message=message)


def _has_ended(store: ArtifactStore, lock: Lock) -> bool:
    """Whether a deployment's run has ended for good: nothing starts it again, and no process of it lives."""
    its_process = store.lock(f"run-{lock.holder.who}", "").look()
    if its_process is not None and its_process.outcome is None and its_process.holder.is_running_here:
        return False
    run = _read(lock.holder.who)
    if run is None or run.state is None:
        return True
    if run.state.type != StateType.CRASHED:
        return run.state.is_final()
    if run.state.name == RESTARTING:
        return False
    return RESUMES not in run.tags or now("UTC") - run.state.timestamp > _CRASH_PASSES


def _name_of(run_id: str) -> str:
    run = _read(run_id)
    return run_id if run is None else run.name


def _read(run_id: str) -> FlowRun | None:
    """Return a run as the server knows it; None if somebody has deleted it."""
    try:
        with get_client(sync_client=True) as client:
            return client.read_flow_run(run_id)  # type: ignore[arg-type]
    except ObjectNotFound:
        return None

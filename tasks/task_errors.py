"""Where an error becomes one sentence in the run's state and log, instead of a traceback, and how the run then ends.

What is final ends it as Failed. What passes (`tasks.failures`) ends it as Crashed where it is a run that is started
again: the Prefect server's automations look for that state.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import psutil
from prefect import State, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.events import Event, RelatedResource, Resource
from prefect.exceptions import CrashedRun, FailedRun, Pause, TerminationSignal
from prefect.states import Crashed, Failed

from infra.errors import InfraError
from infra.settings import settings
from rlhf_core.counting import counted
from rlhf_core.errors import RlhfError
from tasks import failures
from tasks.context import is_inner
from tasks.deadlines import in_time
from tasks.events import tell_failure
from tasks.run_log import run_logger

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

_WORTH_RETURNING = 64 << 20
"""Bytes: to look for what is freed takes a second where Python holds much, as after PyTorch was imported."""
_held_then = 0
"""Bytes that the process had when freed memory was returned last."""
P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", FailedRun, CrashedRun)


def in_one_sentence(function: Callable[P, R]) -> Callable[P, R]:
    """Let expected errors of a flow end it with their sentence: as Failed if they are final, as Crashed if they pass.

    The state's name is one of a few (`tasks.failures.ends_as`), since it is all that some commands show. A flow that a
    task or subflow ends passes on its sentence, its name, and how it ended. The outermost one is Crashed only if
    it is started again; where nobody would, it has Failed. One that a signal ends has done neither, whatever came of
    the signal: Prefect records it as Cancelled or Crashed. Others are told of a failure of the outermost.
    """

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        run = _flow_run()
        inner = run is not None and is_inner(run)
        try:
            with contextlib.ExitStack() as around:
                if not inner:
                    around.enter_context(failures.attended_or_not(run))
                    around.enter_context(_telling_of_its_wait())
                around.enter_context(_signals_as_themselves())
                return function(*args, **kwargs)
        except FailedRun as error:
            return _failed(str(error), _named(error))  # type: ignore[return-value]
        except CrashedRun as error:
            told, name = str(error), _named(error)
        except Exception as error:
            if not (passes := failures.passes(error)) and not isinstance(error, RlhfError | InfraError):
                raise
            told, name = failures.sentence(error), failures.ends_as(error)
            run_logger().error("%s", told)
            if not passes:
                return _failed(told, name)  # type: ignore[return-value]
        return _crashed(told, name) if inner else _ending(told, name, run)  # type: ignore[return-value]

    return _telling_of_failure(guarded)


def _telling_of_failure(function: Callable[P, R]) -> Callable[P, R]:
    """Tell others where the outermost flow has failed."""

    @wraps(function)
    def telling(*args: P.args, **kwargs: P.kwargs) -> R:
        run = _flow_run()
        if run is None or is_inner(run):
            return function(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except Exception as error:  # unexpected: its traceback is in the log
            tell_failure(run, "Failed", f"{type(error).__name__}: {failures.first_line(error)}")
            raise
        if isinstance(result, State) and result.is_failed():
            tell_failure(run, str(result.name), str(result.message))
        return result

    return telling


def _flow_run() -> FlowRun | None:
    context = FlowRunContext.get()
    return None if context is None else context.flow_run


@contextlib.contextmanager
def _telling_of_its_wait() -> Iterator[None]:
    """Tell the server that the process of a run ends which a person has suspended: its silence is no crash.

    Prefect tells only when the run is suspended, and its process gives signs of life until its task has ended.
    """
    context = FlowRunContext.get()
    try:
        yield
    except Pause:
        _tell_that_it_waits(context)
        raise
    if context is not None and context.flow_run_suspension_request.is_requested():  # Prefect ends it after this
        _tell_that_it_waits(context)


def _tell_that_it_waits(context: FlowRunContext | None) -> None:
    run = None if context is None else context.flow_run
    if run is None or run.deployment_id is None:
        return
    about = [("deployment", f"prefect.deployment.{run.deployment_id}")]
    about += [("tag", f"prefect.tag.{tag}") for tag in run.tags]
    event = Event(
        event="prefect.flow-run.Suspended",
        resource=Resource({"prefect.resource.id": f"prefect.flow-run.{run.id}"}),
        related=[RelatedResource({"prefect.resource.role": role, "prefect.resource.id": each}) for role, each in about],
    )
    with get_client(sync_client=True) as client:  # unlike Prefect's own events, it waits for a server that is away
        client.request("POST", "/events", json=[event.model_dump(mode="json")])


def _failed(told: str, name: str) -> State[Any]:
    """Return the state of a task or flow that has failed, which raises its sentence and its name in the caller."""
    return Failed(name=name, message=told, data=_with_name(FailedRun(told), name))


def _crashed(told: str, name: str) -> State[Any]:
    """Return the state of what may go well later: Prefect's automations know it by the name `Crashed`."""
    return Crashed(message=told, data=_with_name(CrashedRun(told), name))


def _with_name(error: E, name: str) -> E:
    error.ends_as = name  # type: ignore[attr-defined]  # Prefect's errors carry the message of a state, not its name
    return error


def _named(error: FailedRun | CrashedRun) -> str:
    return getattr(error, "ends_as", "Failed")


def _ending(told: str, name: str, run: FlowRun | None) -> State[Any]:
    """Return how the outermost run ends that met what passes and has not passed.

    Args:
        told: what it was.
        name: of its state, if it has failed.
        run: itself; None where Prefect runs nothing.
    """
    from infra.services.automations import RESTARTS, RESUMES

    if run is None or run.deployment_id is None or RESUMES not in run.tags:
        return _failed(f"{told}; run it again when that has passed: it goes on from its last commit", name)
    if run.run_count > RESTARTS:
        starts = counted(run.run_count, "start")
        return _failed(
            f"{told}; this was the last of {starts}, and the run is not started again by itself: start one with the "
            "same parameters, and it goes on from the last commit",
            name,
        )
    return _crashed(
        f"{told}; this was start {run.run_count} of {RESTARTS + 1}, and the next goes on from the last commit", name
    )


@contextlib.contextmanager
def _signals_as_themselves() -> Iterator[None]:
    """Raise the signal that ended what runs here, in place of an error that it brought about.

    Ray, told to end while it waits in C, raises a SystemError because of it; and what clears up after it may fail.
    """
    try:
        yield
    except Exception as error:
        behind: BaseException | None = error
        while behind is not None and not isinstance(behind, TerminationSignal):
            behind = behind.__cause__ or behind.__context__
        if behind is None:
            raise
    else:
        return
    raise behind  # out here, where it does not get the error for its own context


def give_memory_back() -> None:
    """Return freed memory to the system: a flow's process stays beside the next stage's Ray cluster.

    glibc keeps what was freed in pieces; after a training stage that is gigabytes.
    Nothing is done where the process has hardly more than after the last time.
    """
    global _held_then  # noqa: PLW0603 - of the process
    if "torch" not in sys.modules:
        return
    if (held := memory_held()) < _held_then + _WORTH_RETURNING:
        _held_then = min(_held_then, held)
        return
    from rlhf_core.freed_memory import give_back

    gc.collect()
    give_back()
    _held_then = memory_held()


def memory_held() -> int:
    """Return the bytes of memory that this process has, without mapped files where the system tells."""
    found = psutil.Process().memory_info()
    return int(found.rss - getattr(found, "shared", 0))


def stage_task(*, name: str, **options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a Prefect task that remembers nothing: the artifact store alone says what is done.

    A task that meets what passes is tried again; it finds in the store what was made before. One that an expected
    error ends is Failed with its sentence, and ends the flow that called it as the error wants it.

    Args:
        name: of the task.
        options: further options of `prefect.task`.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        prefect_task = task(
            name=name,
            cache_policy=NO_CACHE,
            persist_result=False,
            retries=len(failures.DELAYS_S),
            retry_delay_seconds=list(failures.DELAYS_S),
            retry_condition_fn=failures.passes_in,
            **options,
        )(_final_ones_in_a_sentence(function, f"the stage {name}"))

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                result = prefect_task(*args, **kwargs)
            except Exception as error:
                if (tried := failures.further_attempts(error)) is None:
                    raise
                told = failures.sentence(error) + (f" ({tried + 1} attempts)" if tried else "")
                run_logger().error("%s", told)
                raise _with_name(CrashedRun(told), failures.ends_as(error)) from error
            finally:
                give_memory_back()
            if isinstance(result, State):  # Prefect hands the caller of a task the Failed state that it returned
                raise _with_name(FailedRun(str(result.message)), str(result.name))
            return result

        call.fn = function  # type: ignore[attr-defined]  # as Prefect's tasks have it: the plain function, for tests
        return call

    return decorate


def _final_ones_in_a_sentence(function: Callable[P, R], what: str) -> Callable[P, R]:
    """Let a task return a Failed state where it met an expected error that does not pass; others it raises.

    One that does not end in time has met such an error.
    """

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            limit_s = settings().stage_timeout_s
            with _signals_as_themselves():
                return in_time(what, limit_s, "RLHF_STAGE_TIMEOUT_S", lambda: function(*args, **kwargs))
        except (RlhfError, InfraError) as error:
            if failures.passes(error):
                raise
            run_logger().error("%s", error)
            return Failed(name=error.ends_as, message=str(error))  # type: ignore[return-value]

    return guarded

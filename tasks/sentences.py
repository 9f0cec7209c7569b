"""Where a user's mistake becomes one sentence in the run's state and log, instead of a traceback."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from prefect import State, task
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import FailedRun, MissingContextError, TerminationSignal
from prefect.logging import get_logger, get_run_logger
from prefect.states import Failed

from infra.errors import InfraError
from rlhf_core.errors import LostRankError, RlhfError

P = ParamSpec("P")
R = TypeVar("R")


def run_logger() -> Any:
    """Return the run's logger inside a flow or task, an ordinary one elsewhere (tests, plain calls)."""
    try:
        return get_run_logger()
    except MissingContextError:
        return get_logger("rlhf")


def in_one_sentence(function: Callable[P, R]) -> Callable[P, R]:
    """Let expected errors of a flow or task end it as Failed with their sentence, never retried but for a lost process.

    A flow that a failed task or subflow ends passes its sentence on. One that a signal ends has not failed, whatever
    came of the signal: Prefect records it as Cancelled or Crashed.
    """

    @wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with _signals_as_themselves():
                return function(*args, **kwargs)
        except FailedRun as error:
            return Failed(message=str(error))  # type: ignore[return-value]
        except LostRankError:
            raise  # a new group can mend it: what is tried again is tried again
        except (RlhfError, InfraError) as error:
            run_logger().error("%s", error)
            return Failed(message=str(error))  # type: ignore[return-value]

    return guarded


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


def _given_up(error: Exception) -> str | None:
    """Return one line for what retries could not mend (a dead process, a late answer); None for a bug."""
    if "ray" not in sys.modules:
        return str(error) if isinstance(error, TimeoutError) else None
    from tasks.ray_calls import may_pass, sentence

    return sentence(error) if may_pass(error) else None


def give_memory_back() -> None:
    """Return freed memory to the system: a flow's process lives on beside the next stage's Ray cluster.

    glibc keeps what was freed in pieces; after a training stage that is gigabytes.
    """
    if "torch" not in sys.modules:
        return
    import torch

    gc.collect()
    if torch.cuda.is_available():  # else what is cached stays reserved while Ray's actors want it
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # another C library has no malloc_trim, and no need of it
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def stage_task(*, name: str, **options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a Prefect task that remembers nothing: the artifact store alone says what is done.

    A task that an expected error ends is Failed with its sentence, and ends the flow that called it the same way.

    Args:
        name: of the task.
        options: further options of `prefect.task`.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        prefect_task = task(name=name, cache_policy=NO_CACHE, persist_result=False, **options)(
            in_one_sentence(function)
        )

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                result = prefect_task(*args, **kwargs)
            except Exception as error:
                told = _given_up(error)
                if told is None:
                    raise
                raise FailedRun(told) from error
            finally:
                give_memory_back()
            if isinstance(result, State):  # Prefect hands the caller of a task the Failed state that it returned
                raise FailedRun(result.message)
            return result

        call.fn = function  # type: ignore[attr-defined]  # as Prefect's tasks have it: the plain function, for tests
        return call

    return decorate

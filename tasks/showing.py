"""What only shows things can neither fail a run nor hold it up: it warns, once for each kind of thing in each run.

Actors import it, too: no Prefect.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import wraps
from threading import Event, Thread
from typing import Any, ParamSpec, TypeVar

from tasks.failures import first_line
from tasks.run_log import own_flow_run, run_logger

P = ParamSpec("P")
R = TypeVar("R")

DEADLINE_S = 60.0
"""How long a run waits for something that is only shown; what comes later is shown later, if the process still runs."""
AGAIN_S = 5.0
"""How long it waits once something was late: the server that kept it waiting is asked on every page."""
_is_late = Event()
_told: set[tuple[Any, str]] = set()


def only_shows(what: str, *, deadline_s: float | None = None) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Return a decorator for a function that only shows things: where it cannot, it returns None and the run goes on.

    A signal, which ends a run or cancels it, comes through at once.

    Args:
        what: is shown, as the warning calls it.
        deadline_s: longest wait, for what asks a server: that then has a thread of its own. None: it asks none.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                if deadline_s is None:
                    return function(*args, **kwargs)
                return _within(deadline_s, lambda: function(*args, **kwargs))
            except Exception as error:
                warn(what, error)
                return None

        return call

    return decorate


def warn(what: str, error: BaseException) -> None:
    """Say that something cannot be shown, unless the run has been told so of this kind of thing.

    Args:
        what: is shown.
        error: keeps it from being shown.
    """
    with suppress(Exception):  # a warning is only shown, too
        run, logger = own_flow_run(), run_logger()
        logger.debug("%s", what, exc_info=error)
        if (run, what) not in _told:
            _told.add((run, what))
            logger.warning("%s: not shown, and the run goes on without (%s)", what, _reason(error))


def _reason(error: BaseException) -> str:
    return first_line(error) if isinstance(error, _LateError) else f"{type(error).__name__}: {first_line(error)}"


class _LateError(Exception):
    """It was not shown in time."""


def _within(deadline_s: float, function: Callable[[], R]) -> R:
    """Return what a function returns within a deadline; its thread goes on alone after that, until the process ends.

    Raises:
        _LateError: it takes longer.
        Exception: whatever it raised.
    """
    limit_s = min(deadline_s, AGAIN_S) if _is_late.is_set() else deadline_s
    returned: list[R] = []
    raised: list[BaseException] = []
    context, is_over, started = copy_context(), Event(), time.monotonic()

    def asked() -> R:
        from infra.patience import patience

        with patience(limit_s / 2):  # so that the server's answer is reported, and not our deadline
            return function()

    def work() -> None:
        try:
            returned.append(context.run(asked))
        except BaseException as error:
            raised.append(error)
        finally:
            is_over.set()

    Thread(target=work, name="shows", daemon=True).start()
    if not is_over.wait(limit_s):  # the caller's thread, which signals interrupt
        _is_late.set()
        raise _LateError(f"it took more than {limit_s:g} s")
    if not raised:
        _is_late.clear()
        return returned[0]
    if time.monotonic() - started > AGAIN_S:
        _is_late.set()
    if isinstance(raised[0], Exception):
        raise raised[0]
    raise RuntimeError(f"{type(raised[0]).__name__}: {raised[0]}") from raised[0]

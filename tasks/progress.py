"""Lines that a person follows live: stage, step, figures, time left. In the run's log and in the terminal.

Actors import it, too: no Prefect.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from tasks.run_log import own_flow_run, run_logger
from tasks.showing import only_shows

P = ParamSpec("P")
R = TypeVar("R")

PREFIX = "▸"
"""Marks a line that the terminal shows while it follows a run."""


_TELL: ContextVar[Callable[[str], None] | None] = ContextVar("tell", default=None)
_CALLER: ContextVar[UUID | None] = ContextVar("caller", default=None)
"""The flow run whose log has the lines of its stages, too."""


@only_shows("a line of progress")
def say(stage: str, text: str) -> None:
    """Write one line for a person into the run's log, and into that of the flow run that called it."""
    line, tell = f"{PREFIX} {stage:<12} {text}", _TELL.get()
    if tell is not None:
        tell(line)
        return
    run_logger().info("%s", line)
    caller = _CALLER.get()
    if caller is not None and caller != own_flow_run():
        from prefect.logging.handlers import APILogHandler

        record = logging.LogRecord("prefect.flow_runs", logging.INFO, "", 0, line, None, None)
        record.flow_run_id = caller
        APILogHandler().handle(record)  # to the server alone: the process's own log has the line already


def with_lines_of_stages(function: Callable[P, R]) -> Callable[P, R]:
    """Have a flow's log hold the lines of the flows that it calls: a run's page in Prefect shows its own log alone."""

    @wraps(function)
    def reporting(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _CALLER.set(own_flow_run())
        try:
            return function(*args, **kwargs)
        finally:
            _CALLER.reset(token)

    return reporting


@contextmanager
def telling(tell: Callable[[str], None]) -> Iterator[None]:
    """Hand the lines of a block to `tell`: an actor has no run's log, and whoever waits for it has."""
    token = _TELL.set(tell)
    try:
        yield
    finally:
        _TELL.reset(token)


def duration(seconds: float) -> str:
    """Return seconds as a person says them.

    >>> duration(9.4), duration(61), duration(3600)
    ('9 s', '1:01 min', '60:00 min')
    """
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02d} min" if minutes else f"{rest} s"


class Progress:
    """Counts the steps of one stage and says, at most every few seconds, how far it is and what is left."""

    def __init__(self, stage: str, total: int, unit: str, *, every_s: float = 5.0, done: int = 0) -> None:
        self._stage, self._total, self._unit, self._every_s = stage, total, unit, every_s
        self._first, self._started = done, time.monotonic()
        self._said = self._started

    @only_shows("a line of progress")
    def step(self, done: int, **figures: Any) -> None:
        """Say that `done` steps are finished, with figures by name."""
        now = time.monotonic()
        if done < self._total and now - self._said < self._every_s:
            return
        self._said = now
        made = max(1, done - self._first)
        left = (now - self._started) / made * (self._total - done)
        parts = [f"{self._unit} {done}/{self._total}"]
        parts += [f"{name} {_figure(value)}" for name, value in figures.items()]
        parts.append(
            f"{duration(left)} left in this stage" if done < self._total else f"took {duration(now - self._started)}"
        )
        say(self._stage, "  ".join(parts))


def _figure(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)

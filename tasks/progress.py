"""Lines that a person follows live: stage, step, figures, time left. In the run's log and in the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tasks.sentences import run_logger

PREFIX = "▸"
"""Marks a line that the terminal shows while it follows a run."""


_TELL: ContextVar[Callable[[str], None] | None] = ContextVar("tell", default=None)


def say(stage: str, text: str) -> None:
    """Write one line for a person into the run's log."""
    line, tell = f"{PREFIX} {stage:<12} {text}", _TELL.get()
    if tell is None:
        run_logger().info("%s", line)
    else:
        tell(line)


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

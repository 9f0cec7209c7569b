"""Deadlines: one for several waits, and one for work that has none of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_SHORTEST_S = 0.001


class Deadline:
    """One for all that is waited for in turn.

    Args:
        timeout_s: from now on.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._until = timeout_s, time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return what is left of it.

        Raises:
            TimeoutError: if nothing is; a store would take a timeout of 0 ms for none.
        """
        left_s = self._until - time.monotonic()
        if left_s < _SHORTEST_S:
            raise TimeoutError(f"not done within {self._timeout_s:.0f} s")
        return left_s


def within(timeout_s: float, work: Callable[[], object]) -> None:
    """Do something in a thread, which is left to itself if it takes too long.

    Raises:
        TimeoutError: if it does.
        Exception: what it failed with.
    """
    failed: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:  # raised again, by whoever waits
            failed.append(error)

    started = time.monotonic()
    thread = threading.Thread(target=run, name="within", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive() or (failed and time.monotonic() - started >= timeout_s):
        raise TimeoutError(f"not done within {timeout_s:.0f} s")
    if failed:
        raise failed[0]

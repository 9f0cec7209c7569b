"""Every flow and every stage ends in time: late ones get an error where they are, and else their process ends.

Prefect's own time limit reaches only what comes back to Python. Here a signal interrupts the thread, also in a call of
the system or of Ray, as Ctrl-C would, and what it was at is part of the sentence. A thread that does not hear it, or
whose clearing up hangs too, has some time more. Then the run is reported as Failed by another thread, and the process
ends: all that belongs to the run ends with its process, as after a kill.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar
from uuid import UUID

from infra.errors import InfraError
from infra.services import prefect_api
from infra.settings import CHECKOUT, settings
from tasks.run_log import own_flow_run
from tasks.taken_over import HELD

R = TypeVar("R")

CLEARING_UP_S = 120.0
"""From the error to the end of the process: a Ray cluster is ended in a minute at most."""
_SIGNAL = signal.SIGUSR2
_STDERR = 2


class LateError(InfraError):
    """A flow or a stage did not end in time."""

    ends_as = "Failed: not done in time"


class _Interruption(KeyboardInterrupt):
    """Leads out of a call that is late: Ray takes no other for an interruption, and nothing on the way catches it."""


class _Deadline:
    """One that is open, in the thread that opened it."""

    def __init__(self, what: str, limit_s: float, setting: str) -> None:
        self.what, self.limit_s, self.setting = what, limit_s, setting
        self.thread = threading.get_ident()
        self.run: UUID | None = own_flow_run()
        self.held = HELD.get()
        self.closed = threading.Event()
        self.is_due = self.is_told = self.is_closing = False
        """Whether its time is over; whether its thread was told so, once; whether its call has ended."""
        self.place: str | None = None
        """Where its thread was when it was interrupted."""
        self._former: Any = None
        """Handler of the signal that this one has put ours in the place of."""

    def begin(self) -> None:
        """Open it."""
        is_main = self.thread == threading.main_thread().ident
        if is_main and signal.getsignal(_SIGNAL) is not _raise_what_is_due:
            self._former = signal.signal(_SIGNAL, _raise_what_is_due)
        _open.append(self)
        watcher = threading.Thread(target=self._watch, name=f"deadline of {self.what}", daemon=True)
        with _telling:  # until it runs, a thread has its parent's id, and would get what is raised for that one
            watcher.start()

    def close(self) -> None:
        """End its watch: from here on nothing is raised and no signal is sent for it."""
        with _telling:
            self.closed.set()
        if self._former is not None:
            signal.signal(_SIGNAL, self._former)

    def error(self) -> LateError:
        """Return what is raised."""
        place = self.place or _place(sys._current_frames().get(self.thread))
        return LateError(
            f"waited {self.limit_s:.0f} s for {self.what} to end, and it is still {place}; if it needs more time, "
            f"raise {self.setting}"
        )

    def _watch(self) -> None:
        """Wait for the end, tell the thread that it is late, and end the process if that does not help."""
        if self.closed.wait(self.limit_s):
            return
        with _telling:
            if self.closed.is_set():
                return
            self.is_due = True
            self._interrupt()
        if not self.closed.wait(CLEARING_UP_S):
            _end_process(self)

    def _interrupt(self) -> None:
        if self.thread == threading.main_thread().ident:
            signal.pthread_kill(self.thread, _SIGNAL)
        elif _to_tell(self.thread) is self:  # it hears it when it comes back to Python
            self.is_told, self.place = True, _place(sys._current_frames().get(self.thread))
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread), ctypes.py_object(_Interruption))


_open: list[_Deadline] = []
"""The outermost of each thread first."""
_telling = threading.Lock()
"""Held while a thread is told that it is late, and while a deadline opens or closes."""


def in_time(what: str, limit_s: float, setting: str, function: Callable[[], R]) -> R:
    """Return what a function returns, in time.

    It is no context manager: an interruption that comes while a `with` is left would not meet the block any more.

    Args:
        what: it is, such as "the stage train-sft".
        limit_s: how long it may take.
        setting: which says so.
        function: what is called.

    Raises:
        LateError: if it does not end in time.
    """
    deadline = _Deadline(what, limit_s, setting)
    try:
        try:
            deadline.begin()
            return function()
        finally:
            deadline.is_closing = True  # before any call: Python raises nothing between two calls
            try:
                deadline.close()
            except BaseException:  # Ctrl-C, or an interruption on its way already to another thread than the main one
                deadline.close()
                raise
    except BaseException as error:
        if deadline.is_told:  # whatever came of it
            raise deadline.error() from error
        raise
    finally:
        if deadline in _open:
            _open.remove(deadline)
        with _telling:  # not the watcher too
            _raise_what_is_due(_SIGNAL, sys._getframe())  # for one around it, while this one closed


def _to_tell(thread: int) -> _Deadline | None:
    """Return what a thread is to be told: nothing while a call of its ends, or while it clears up after another."""
    its_own = [each for each in [*_open] if each.thread == thread]
    if any(each.is_told or each.is_closing for each in its_own):
        return None
    return next((each for each in its_own if each.is_due), None)


def _raise_what_is_due(_: int, frame: FrameType | None) -> None:
    if (deadline := _to_tell(threading.get_ident())) is not None:
        deadline.is_told, deadline.place = True, _place(frame)
        raise _Interruption


def _place(frame: FrameType | None) -> str:
    """Return which line of ours a thread is at, for people."""
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(CHECKOUT) and not file.is_relative_to(sys.prefix) and file != Path(__file__):
            return f"at {file.relative_to(CHECKOUT)}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "at work"


def _end_process(deadline: _Deadline) -> NoReturn:
    """Report the runs of this process as Failed, unless it has lost them to another, and end it."""
    told = str(deadline.error())
    status = 1  # a worker reports this as a crash
    try:
        os.write(_STDERR, f"{told}\n".encode())  # no logger: the thread that hangs may have its lock
        faulthandler.dump_traceback(_STDERR)
        if deadline.held is not None:
            deadline.held.release("failed", told)  # first, as elsewhere; and it finds out who has the run now
        if deadline.held is not None and deadline.held.is_lost:
            status = 0  # nothing is reported: another goes on with the run
        elif api_url := settings().prefect_api_url:
            state = {"type": "FAILED", "name": LateError.ends_as, "message": told}
            for run in dict.fromkeys(each.run for each in (*_open[::-1], deadline) if each.run):
                prefect_api.call(api_url, "POST", f"/flow_runs/{run}/set_state", {"state": state, "force": True})
            status = 0
    finally:
        os._exit(status)

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn
from uuid import UUID

from infra.errors import InfraError
from infra.services import prefect_api
from infra.settings import CHECKOUT, settings
from tasks.run_log import own_flow_run, run_logger

CLEARING_UP_S = 120.0
"""From the error to the end of the process: a Ray cluster is ended in a minute at most."""
_SIGNAL = signal.SIGUSR2
_STDERR = 2


class LateError(InfraError):
    """A flow or a stage did not end in time."""

    ends_as = "Failed: not done in time"


class _Interruption(KeyboardInterrupt):
    """Leads out of a block that is late: Ray takes no other for an interruption, and nothing on the way catches it."""


class _Deadline:
    """One that is open, in the thread that opened it."""

    def __init__(self, what: str, limit_s: float, setting: str) -> None:
        self.what, self.limit_s, self.setting = what, limit_s, setting
        self.thread = threading.get_ident()
        self.run: UUID | None = own_flow_run()
        self.closed = threading.Event()
        self.is_due = False
        self.place: str | None = None
        """Where its thread was when it was interrupted."""

    def watch(self) -> None:
        """Wait for the end, tell the thread that it is late, and end the process if that does not help."""
        if self.closed.wait(self.limit_s):
            return
        self.is_due = True
        _interrupt(self)
        if not self.closed.wait(CLEARING_UP_S):
            _end_process(self)

    def error(self) -> LateError:
        """Return what is raised."""
        place = self.place or _place(sys._current_frames().get(self.thread))
        return LateError(
            f"waited {self.limit_s:.0f} s for {self.what} to end, and it is still {place}; if it needs more time, "
            f"raise {self.setting}"
        )


_open: list[_Deadline] = []
"""The outermost first."""


@contextmanager
def in_time(what: str, limit_s: float, setting: str) -> Iterator[None]:
    """Have a block end in time.

    Args:
        what: it is, such as "the stage train-sft".
        limit_s: how long it may take.
        setting: which says so.

    Raises:
        LateError: if it does not.
    """
    deadline = _Deadline(what, limit_s, setting)
    is_main = threading.current_thread() is threading.main_thread()
    former = signal.signal(_SIGNAL, _raise_what_is_due) if is_main and not _open else None
    _open.append(deadline)
    threading.Thread(target=deadline.watch, name=f"deadline of {what}", daemon=True).start()
    try:
        yield
    except BaseException as error:
        if deadline.is_due:  # whatever came of it
            raise deadline.error() from error
        raise
    finally:
        deadline.closed.set()  # first: from here on nothing is raised for it
        _open.remove(deadline)
        if former is not None:
            signal.signal(_SIGNAL, former)


def _interrupt(deadline: _Deadline) -> None:
    if deadline.thread == threading.main_thread().ident:
        signal.pthread_kill(deadline.thread, _SIGNAL)
    else:  # it hears it when it comes back to Python
        deadline.place = _place(sys._current_frames().get(deadline.thread))
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(deadline.thread), ctypes.py_object(_Interruption))


def _raise_what_is_due(_: int, frame: FrameType | None) -> None:
    for deadline in _open:
        if deadline.is_due and not deadline.closed.is_set():
            deadline.place = deadline.place or _place(frame)
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
    """Report the runs of this process as Failed, and end it."""
    told = str(deadline.error())
    status = 1  # a worker reports this as a crash
    try:
        run_logger().error("%s", told)
        faulthandler.dump_traceback(_STDERR)
        if api_url := settings().prefect_api_url:
            state = {"type": "FAILED", "name": LateError.ends_as, "message": told}
            for run in dict.fromkeys(each.run for each in (*_open[::-1], deadline) if each.run):
                prefect_api.call(api_url, "POST", f"/flow_runs/{run}/set_state", {"state": state, "force": True})
            status = 0
    finally:
        os._exit(status)

"""The owner's side of the process that runs reward functions: what fails costs its row a zero. Imports no torch."""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from rlhf_core.errors import RlhfError
from rlhf_core.rewards.child import HEADER
from rlhf_core.rewards.resolve import RewardFunction

_log = logging.getLogger(__name__)

LOAD_S = 120.0
"""Longest time for starting the process and importing a function with all that it imports."""
FLOAT32_MAX = 3.4028234663852886e38
"""Scores are float32: what is larger would be infinite there."""
_BOOT = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from rlhf_core.rewards.child import main; main({})"


class RewardFunctionError(RlhfError):
    """A reward function did not give a number; the message says why."""


class _Running(NamedTuple):
    process: subprocess.Popen[bytes]
    requests: int
    replies: int
    loaded: list[RewardFunction]
    """By the numbers under which the child knows them: two functions may have one name."""


class RewardProcess:
    """Runs reward functions, one call at a time, in a child that is killed when a call takes too long.

    Started on the first call and again after it was lost; ended by `close`, with this object, and with this process.

    Args:
        timeout_s: longest time of one call.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._running: _Running | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._lock = threading.RLock()

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is none."""
        return None if self._running is None else self._running.process.pid

    def load(self, function: RewardFunction) -> None:
        """Have the child import a function; once for each child.

        Raises:
            RewardFunctionError: it cannot be imported.
        """
        with self._lock:
            running = self._running or self._start()
            if _number_of(function, running) is not None:
                return
            content = {"target": function.target, "form": function.form, "arguments": dict(function.arguments)}
            self._ask(running, ("load", len(running.loaded), content), LOAD_S)
            running.loaded.append(function)

    def call(self, function: RewardFunction, *arguments: Any) -> float:
        """Return what the function makes of the arguments.

        Raises:
            RewardFunctionError: it raised, took too long, ended its process, or returned no number.
        """
        with self._lock:
            self.load(function)
            number = None if self._running is None else _number_of(function, self._running)
            if self._running is None or number is None:
                raise RewardFunctionError("its process is gone")
            return self._ask(self._running, ("call", number, arguments), self._timeout_s)

    def close(self) -> None:
        """End the child, if there is one."""
        with self._lock:
            if self._finalizer is not None:
                self._finalizer()
            self._running = self._finalizer = None

    def _ask(self, running: _Running, request: tuple[str, int, Any], limit_s: float) -> float:
        deadline = time.monotonic() + limit_s
        content = pickle.dumps(request)
        try:
            _write(running.requests, HEADER.pack(len(content)) + content, deadline)
            reply = json.loads(_read_line(running.replies, deadline))
        except TimeoutError:
            self.close()
            raise RewardFunctionError(f"it took longer than {limit_s:g} s") from None
        except OSError:  # the pipe broke, or ended
            code = _exit_code(running.process)
            self.close()
            raise RewardFunctionError(f"it ended its process ({code})") from None
        if "error" in reply:
            raise RewardFunctionError(reply["error"])
        value = float(reply["value"])
        if not math.isfinite(value):
            raise RewardFunctionError(f"it returned {value}")
        if abs(value) > FLOAT32_MAX:
            raise RewardFunctionError(f"it returned {value}, which float32 has no room for")
        return value

    def _start(self) -> _Running:
        theirs, ours = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT.format(theirs), json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(theirs,),
                start_new_session=True,  # Ctrl-C is the owner's to hear; and what a function starts is ended with it
            )
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        assert process.stdin is not None
        assert process.stdout is not None
        requests, replies = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(requests, False)
        self._running = _Running(process, requests, replies, [])
        self._finalizer = weakref.finalize(self, _end, process, ours, os.getpid())
        return self._running


def call_each(
    process: RewardProcess, function: RewardFunction, arguments: Sequence[tuple[Any, ...]], *, names: Sequence[str]
) -> list[float]:
    """Return the function's raw value for each row.

    A row for which the function gives no number gets 0 and a warning that names function, row and reason.

    Args:
        process: where the function runs.
        function: what is called.
        arguments: of each call.
        names: of the rows, for warnings.
    """
    values = []
    for row, name in zip(arguments, names, strict=True):
        try:
            values.append(process.call(function, *row))
        except RewardFunctionError as error:
            _log.warning("reward function %s: %s; %s gets 0 from it", function.name, error, name)
            values.append(0.0)
    return values


def _number_of(function: RewardFunction, running: _Running) -> int | None:
    return next((number for number, loaded in enumerate(running.loaded) if loaded is function), None)


def _end(process: subprocess.Popen[bytes], lifeline: int, owner: int) -> None:
    """Kill the child and its own children, and wait for it."""
    if os.getpid() != owner:  # a forked copy of the owner is not the owner
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    os.close(lifeline)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()


def _exit_code(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        return "it closed its pipes"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _write(descriptor: int, content: bytes, deadline: float) -> None:
    left = memoryview(content)
    while left:
        _await(descriptor, select.POLLOUT, deadline)
        with suppress(BlockingIOError):
            left = left[os.write(descriptor, left) :]


def _read_line(descriptor: int, deadline: float) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        _await(descriptor, select.POLLIN, deadline)
        part = os.read(descriptor, 65536)
        if not part:
            raise BrokenPipeError
        line += part
    return line


def _await(descriptor: int, event: int, deadline: float) -> None:
    waiting = select.poll()
    waiting.register(descriptor, event)
    if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError

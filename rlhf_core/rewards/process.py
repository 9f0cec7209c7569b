"""Reward functions run in a process of their own: it may hang, crash or be killed, and nothing else is lost.

`RewardProcess` is the owner's side: it starts the process, asks it, and kills it when a call takes too long; a call
that fails gives no number. `serve` is what the process runs: it reads pickled requests from its owner, answers in lines
of JSON, and ends with its owner, whatever it is doing then. Neither imports torch, unless a function does.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import pickle
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import IO, Any, NamedTuple

from rlhf_core.errors import RlhfError
from rlhf_core.rewards.abstaining import DIED, NO_NUMBER, RAISED, TIMED_OUT, failure
from rlhf_core.rewards.resolve import RewardFunction

_log = logging.getLogger(__name__)

LOAD_S = 120.0
"""Longest time for starting the process and importing a function with all that it imports."""
FLOAT32_MAX = 3.4028234663852886e38
"""Scores are float32: what is larger would be infinite there."""
_HEADER = struct.Struct(">Q")
"""Of a request: its length in bytes."""
_MEMORY_BYTES = 8 << 30
"""A function may take no more: an answer like 9^{9^{9^9}} is not to cost the machine its memory."""
_LONGEST_REASON = 300
_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from rlhf_core.rewards.process import serve; serve({})"
)


class RewardFunctionError(RlhfError):
    """A reward function did not give a number.

    Args:
        told: what it did instead, as a sentence about `it`.
        kind: which of `abstaining.KINDS` that is.
    """

    def __init__(self, told: str, kind: str) -> None:
        super().__init__(told, kind)
        self.told, self.kind = told, kind

    def __str__(self) -> str:
        """Return what it did."""
        return self.told


class Called(NamedTuple):
    """What came of one call."""

    value: float
    """NaN if the call failed."""
    failure: str | None = None
    """Why there is no number, as `abstaining.failure` puts it; None if there is one."""


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
                raise RewardFunctionError("its process is gone", DIED)
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
            _write(running.requests, _HEADER.pack(len(content)) + content, deadline)
            reply = json.loads(_read_line(running.replies, deadline))
        except TimeoutError:
            self.close()
            raise RewardFunctionError(f"it took longer than {limit_s:g} s", TIMED_OUT) from None
        except OSError:  # the pipe broke, or ended
            code = _exit_code(running.process)
            self.close()
            raise RewardFunctionError(f"it ended its process ({code})", DIED) from None
        if "error" in reply:
            raise RewardFunctionError(reply["error"], reply["kind"])
        value = float(reply["value"])
        if not math.isfinite(value):
            raise RewardFunctionError(f"it returned {value}", NO_NUMBER)
        if abs(value) > FLOAT32_MAX:
            raise RewardFunctionError(f"it returned {value}, which float32 has no room for", NO_NUMBER)
        return value

    def _start(self) -> _Running:
        theirs, ours = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT.format(theirs), json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(theirs,),
                start_new_session=True,  # Ctrl-C reaches the owner alone; and what a function starts is ended with it
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
) -> list[Called]:
    """Return the function's raw value for each row; of a call that fails, the reason, with a warning.

    Args:
        process: where the function runs.
        function: what is called.
        arguments: of each call.
        names: of the rows, for warnings.
    """
    values = []
    for row, name in zip(arguments, names, strict=True):
        try:
            values.append(Called(process.call(function, *row)))
        except RewardFunctionError as error:
            _log.warning("reward function %s: %s; it does not judge %s", function.name, error, name)
            values.append(Called(math.nan, failure(error.kind, str(error))))
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


# --- in the process: what the owner's requests are answered by


def serve(lifeline: int) -> None:
    """Answer requests until the owner closes its end: what the child runs.

    Args:
        lifeline: file descriptor of a pipe whose other end the owner holds open as long as it runs.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what functions print is no reply
    _end_with_owner(lifeline)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    functions: dict[int, Callable[..., Any]] = {}
    while (request := _read_request(requests)) is not None:
        try:
            reply = _answer(functions, *pickle.loads(request))
        except BaseException as error:  # also SystemExit: nothing that a function does ends the service
            reply = {"error": f"it raised {type(error).__name__}: {error}"[:_LONGEST_REASON], "kind": RAISED}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def _answer(functions: dict[int, Callable[..., Any]], kind: str, number: int, content: Any) -> dict[str, Any]:
    if kind == "load":
        functions[number] = _load(**content)
        return {"value": 0.0}
    value = functions[number](*content)
    try:
        return {"value": float(value)}
    except (TypeError, ValueError):
        return {"error": f"it returned {value!r}, which is not a number"[:_LONGEST_REASON], "kind": NO_NUMBER}


def _load(target: str | bytes, form: str, arguments: dict[str, Any]) -> Callable[..., Any]:
    if isinstance(target, bytes):
        function, arguments = pickle.loads(target)
    else:
        module, _, attribute = target.partition(":")
        function = getattr(import_module(module), attribute)

    if form != "tokens":
        return lambda *given: function(*given, **arguments)
    import torch  # noqa: PLC0415  # seconds, which only functions of tokens take, and no response's time limit

    def call_with_tensors(ids: list[int], mask: list[int], start: int, end: int, answer: str | None) -> Any:
        return function(
            torch.tensor(ids), torch.tensor(mask), response_start=start, response_end=end, gt_answer=answer, **arguments
        )

    return call_with_tensors


def _read_request(stream: IO[bytes]) -> bytes | None:
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (length,) = _HEADER.unpack(header)
    content = stream.read(length)
    return content if len(content) == length else None


def _end_with_owner(lifeline: int) -> None:
    """Have the kernel end this process when the owner's end of the pipe closes.

    A thread that waits for it would wait for ever where a function holds the interpreter (a regular
    expression that never comes back); SIGIO's default action asks no interpreter.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it closed before the kernel was asked
        sys.exit(0)

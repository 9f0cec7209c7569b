"""The process in which reward functions run: it may hang, crash or be killed, and nothing else is lost.

Reads pickled requests from its owner, answers in lines of JSON, and ends with its owner, whatever it is doing then.
Imports no torch unless a function does.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import resource
import select
import signal
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import IO, Any

HEADER = struct.Struct(">Q")
MEMORY_BYTES = 8 << 30
"""A function may take no more: an answer like 9^{9^{9^9}} is not to cost the machine its memory."""
_LONGEST_REASON = 300


def main(lifeline: int) -> None:
    """Serve requests until the owner closes its end.

    Args:
        lifeline: file descriptor of a pipe whose other end the owner holds open while it lives.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what functions print is no reply
    _end_with_owner(lifeline)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    functions: dict[int, Callable[..., Any]] = {}
    while (request := _read(requests)) is not None:
        try:
            reply = _answer(functions, *pickle.loads(request))
        except BaseException as error:  # also SystemExit: nothing that a function does ends the service
            reply = {"error": f"it raised {type(error).__name__}: {error}"[:_LONGEST_REASON]}
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
        return {"error": f"it returned {value!r}, which is not a number"[:_LONGEST_REASON]}


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


def _read(stream: IO[bytes]) -> bytes | None:
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
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

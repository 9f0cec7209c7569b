"""Processes forked from a server that has imported what they need: imports are most of what their start costs.

In place of Python one runs a caller, which hands arguments, environment and files to the server, passes
SIGTERM and SIGINT on, and ends as the process ends. From outside the process looks like any other: processes are known
by their environment and, where one runs a module, by their command line, and so its own are written over those it was
forked with. Where the server is gone, or a process that it forks could not do what any other can, the caller becomes
Python itself.

    server     python -P -m infra.forked_processes serve SOCKET MODULE ..., or start
    caller     forking_python(SOCKET) FILE ..., or -mMODULE ...

Ray and Prefect cannot be among the modules: they read their settings once, when they are imported. What Python itself
reads when it starts is the server's, so all have one hash seed.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import select
import shlex
import signal
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

_NUMBER_BYTES = 8
_FILES = 3
_ROOM_BYTES = 16384
"""For what a process has more in its environment than the server."""
_ARGUMENTS_ROOM = 32
_BEGIN_TIMEOUT_S = 30.0
"""Ray gives a process 60 s to come up."""


def forking_python(address: Path) -> str:
    """Return what stands for Python in a command of a shell.

    A file of code follows, or `-mMODULE`: as one word, or the caller would look like a process of the module, too.
    """
    return shlex.join([sys.executable, "-I", "-S", __file__, "call", str(address)])


def server_command(address: Path, modules: Sequence[str], *, verb: str = "serve") -> list[str]:
    """Return the command that runs a server.

    Args:
        address: of its socket, in a directory that is closed to others.
        modules: what it imports.
        verb: `serve`, or `start` to leave the server behind as soon as it can be called.
    """
    return [sys.executable, "-P", "-m", __name__, verb, str(address), *modules, "." * _ARGUMENTS_ROOM]


def server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that a server runs in: what is read while it imports, with room for a process's own."""
    # Without a context of CUDA's, which a fork would break.
    return {**environment, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "ROOM": "." * _ROOM_BYTES}


def call(address: str, arguments: list[str]) -> int:
    """Have a process forked, and end as it ends; be Python, if none can be."""
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())  # a handler that passed one on would not be run if it came just before a wait
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    with socket.socket(socket.AF_UNIX) as server:
        try:
            process = _forked(server, address, arguments)
        except OSError:
            os.execv(sys.executable, [sys.executable, *arguments])
        while woken in select.select([server, woken], [], [])[0]:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(process, woken.recv(1)[0])
        status = _number(server)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _forked(server: socket.socket, address: str, arguments: list[str]) -> int:
    """Return the id of a process that the server has forked.

    Raises:
        OSError: if it does not.
    """
    words = json.dumps({"arguments": arguments, "environment": dict(os.environ), "cwd": os.getcwd()}).encode()
    server.settimeout(_BEGIN_TIMEOUT_S)
    server.connect(address)
    socket.send_fds(server, [len(words).to_bytes(_NUMBER_BYTES, "big")], range(_FILES))
    server.sendall(words)
    process = _number(server)
    server.settimeout(None)
    return process


def _number(server: socket.socket) -> int:
    """Return a number that the server says.

    Raises:
        ConnectionError: if it says nothing.
    """
    if not (found := server.recv(_NUMBER_BYTES)):
        raise ConnectionError("the server of processes does not say what became of one")
    return int.from_bytes(found, "big", signed=True)


def serve(address: str, modules: Sequence[str], *, stays: bool) -> NoReturn:
    """Fork a process for everyone who calls, until this process is ended; callers wait while it imports.

    Args:
        address: of its socket.
        modules: what is imported.
        stays: in this process, not in a child that is left behind.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.new")
        listener.listen(64)
        os.rename(f"{address}.new", address)
        if not stays and os.fork():
            os._exit(0)
        for module in modules:
            importlib.import_module(module)
        assert "ray" not in sys.modules
        for each in weakref.finalize._registry:  # type: ignore[attr-defined]
            each.atexit = False  # what this process made is not for others to take down
        gc.freeze()  # what all share is not looked through, and so not copied, each time one collects its garbage
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody is waited for here
        while True:
            caller, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                try:
                    _watch(caller)
                finally:
                    os._exit(1)
            caller.close()


def _watch(caller: socket.socket) -> NoReturn:
    """Fork the process, and tell the caller how it ended, whoever ended it; it does not outlive a caller's kill."""
    length, files, *_ = socket.recv_fds(caller, _NUMBER_BYTES, _FILES)
    words = bytearray()
    while len(words) < int.from_bytes(length, "big"):
        if not (piece := caller.recv(1 << 16)):
            os._exit(1)  # the caller was killed
        words += piece
    wanted = json.loads(words)
    if select.select([caller], [], [], 0)[0] or not _is_possible(wanted["environment"]):
        os._exit(1)  # it has gone, or becomes Python itself
    process = os.fork()
    if process == 0:
        caller.close()
        _process(wanted, files)
    for file in files:
        os.close(file)
    _tell(caller, process)
    ended = os.pidfd_open(process)
    watched: list[Any] = [caller, ended]
    if ended not in select.select(watched, [], [])[0]:
        os.kill(process, signal.SIGKILL)  # the caller was killed
    _, status = os.waitpid(process, 0)
    _tell(caller, os.waitstatus_to_exitcode(status))
    os._exit(0)


def _is_possible(environment: Mapping[str, str]) -> bool:
    """Whether a process can be forked: CUDA has not begun here, and there is room for its environment."""
    torch = sys.modules.get("torch")
    start, end = _place(_ENVIRONMENT)
    return (torch is None or not torch.cuda._is_in_bad_fork()) and len(_text(environment)) <= end - start


def _tell(caller: socket.socket, number: int) -> None:
    with suppress(OSError):  # the caller was killed
        caller.sendall(number.to_bytes(_NUMBER_BYTES, "big", signed=True))


def _process(wanted: Mapping[str, Any], files: list[int]) -> NoReturn:
    """Be the process that a caller wants."""
    code = 1
    try:
        os.setsid()  # Ray kills the whole group of a worker
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        _run(**wanted)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):  # what Python does at its end: Prefect sends what it has not sent yet
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run(arguments: list[str], environment: dict[str, str], cwd: str) -> None:
    os.environ.clear()  # and not item by item: titles that Ray gives would lie where the former environment did
    os.environ.update(environment)
    _write_over(_ENVIRONMENT, _text(environment))
    os.chdir(cwd)
    random.seed()  # two processes with the same jitter would meet again and again
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or os.cpu_count() or 1))  # read at its import
    first, *others = arguments
    if first.startswith("-m"):
        module = first.removeprefix("-m")
        words = [sys.executable, "-m", module, *others]
        _write_over(_COMMAND, b"".join(word.encode() + b"\0" for word in words))
        sys.argv = [module, *others]
        sys.path.insert(0, cwd)
        sys.modules.pop(module, None)
        runpy.run_module(module, run_name="__main__")
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(first))
        runpy.run_path(first, run_name="__main__")


_COMMAND, _ENVIRONMENT = 48, 50
"""Fields of /proc/PID/stat, as its manual page counts: where they begin. The next field is where they end."""


def _place(field: int) -> tuple[int, int]:
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    return int(fields[field - 3]), int(fields[field - 2])


def _text(environment: Mapping[str, str]) -> bytes:
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())


def _write_over(field: int, text: bytes) -> None:
    """Write over what others see of this process: its command line, or its environment; cut off if there is no room."""
    start, end = _place(field)
    ctypes.memmove(start, text[: end - start].ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    _, verb, where, *rest = sys.argv
    sys.exit(call(where, rest) if verb == "call" else serve(where, rest[:-1], stays=verb == "serve"))

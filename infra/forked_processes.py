"""Processes forked from a server that has imported what they need: imports are most of what their start costs.

A caller is run instead of Python. It hands arguments, environment and files to the server, passes SIGTERM and SIGINT
on, and ends as the process ends. From outside the process looks like any other: processes are known by their
environment and, where one runs a module, by their command line, so its own are written over those it was forked with.
The caller becomes Python itself where the server is gone or silent, where CUDA has begun in the server, where the
environment does not fit, and while a server that stays imports anew, since a file that it had imported was changed.

    server     python -P -m infra.forked_processes serve SOCKET MODULE ..., or start
    caller     forking_python(SOCKET) FILE ..., or -mMODULE ...

Ray cannot be among the modules, and Prefect only if the server has the same settings: both read them once, when they
are imported. What Python itself reads when it starts is the server's, so all have one hash seed.
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
import time
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
_BEGIN_TIMEOUT_S = 20.0
"""Until a caller becomes Python. Ray gives a process 60 s to come up."""
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_KILL_WITH_PARENT = 1
"""Of prctl."""


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
        verb: `serve`, or `start` to leave the server behind, which imports while callers wait.
    """
    return [sys.executable, "-P", "-m", __name__, verb, str(address), *modules, "." * _ARGUMENTS_ROOM]


def server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that a server runs in: what is read while it imports, with room for a process's own."""
    # With it transformers can ask for GPUs and CUDA does not begin: no process that is forked later could use it.
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
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            if select.select([woken], [], [], 0)[0]:
                os.kill(os.getpid(), woken.recv(1)[0])
            first, *others = arguments  # `-mMODULE` is two words from here on: the process is known by them
            words = ["-m", first.removeprefix("-m")] if first.startswith("-m") else [first]
            os.execv(sys.executable, [sys.executable, *words, *others])
        with suppress(OSError):  # Ray had this one killed first when memory is short, and meant the process
            _OOM_SCORE.write_text("0")
        while woken in select.select([server, woken], [], [])[0]:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(process, woken.recv(1)[0])
        try:
            status = _number(server)
        except ConnectionError:  # the watcher was killed, and the process ended with it
            return 1
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
    wanted = {"arguments": arguments, "environment": dict(os.environ), "cwd": os.getcwd(), "oom_score": ""}
    with suppress(OSError):
        wanted["oom_score"] = _OOM_SCORE.read_text()
    words = json.dumps(wanted).encode()
    deadline = time.monotonic() + _BEGIN_TIMEOUT_S
    server.settimeout(_BEGIN_TIMEOUT_S)
    server.connect(address)
    server.settimeout(max(deadline - time.monotonic(), 1.0))
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
    """Fork a process for everyone who calls, until this process is ended.

    Args:
        address: of its socket.
        modules: what is imported.
        stays: True: this process serves, as long as the one that started it lives, and its socket is there once it has
            imported; False: a child does, its socket is there before that, and this process ends.
    """
    os.close(os.pidfd_open(os.getpid()))  # an old system, or a container that forbids it, has no server
    began, parent = time.time_ns(), os.getppid()
    if stays:
        _end_with(parent)
    new = f"{address}.{os.getpid()}"
    with suppress(FileNotFoundError):
        os.unlink(new)  # of one that was killed, or of this one, before it began anew
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(new)
        listener.listen(64)
        if not stays:
            os.rename(new, address)
            if os.fork():
                os._exit(0)
        for module in modules:
            importlib.import_module(module)
        assert "ray" not in sys.modules
        for each in weakref.finalize._registry:  # type: ignore[attr-defined]
            each.atexit = False  # what this process made is not for others to take down
        gc.freeze()  # what all share is not looked through, and so not copied, each time one collects its garbage
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody is waited for here
        if stays:
            os.rename(new, address)
        imported = _imported_files() if stays else {}
        _fork(listener, imported, since=began, until=time.time_ns())


def _fork(listener: socket.socket, imported: Mapping[str, int], *, since: int, until: int) -> NoReturn:
    """Fork a process for everyone who calls; begin anew if a file has changed that was imported between these times."""
    while True:
        caller, _ = listener.accept()
        if any(_changed_at(file) != at or since < at <= until for file, at in imported.items()):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # as a new process has it; watchers that end are its children
            os.execv(sys.executable, sys.orig_argv)  # its files are closed by that: the caller hears it
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                _watch(caller)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        caller.close()


def _end_with(parent: int) -> None:
    """Have this process killed when its parent ends."""
    ctypes.CDLL(None).prctl(_KILL_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # before that
        os._exit(1)


def _imported_files() -> dict[str, int]:
    """Return when each file was changed that modules were imported from."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return {file: _changed_at(file) for file in files if file and os.path.exists(file)}


def _changed_at(file: str) -> int:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:  # it is gone
        return 0


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
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the process decides when it ends
    watcher, process = os.getpid(), os.fork()
    if process == 0:
        caller.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _end_with(watcher)
        _become(wanted, files)
    for file in files:
        os.close(file)
    _tell(caller, process)
    ended = os.pidfd_open(process)
    watched: list[Any] = [caller, ended]
    if ended not in select.select(watched, [], [])[0]:  # the caller was killed
        with suppress(ProcessLookupError):  # it has no group of its own yet
            os.killpg(process, signal.SIGKILL)
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    _tell(caller, os.waitstatus_to_exitcode(status))
    os._exit(0)


def _is_possible(environment: Mapping[str, str]) -> bool:
    """Whether a process that is forked here can do what any other can: CUDA has not begun, its environment fits."""
    torch = sys.modules.get("torch")
    start, end = _place(_ENVIRONMENT)
    return (torch is None or not torch.cuda._is_in_bad_fork()) and len(_text(environment)) <= end - start


def _tell(caller: socket.socket, number: int) -> None:
    with suppress(OSError):  # the caller was killed
        caller.sendall(number.to_bytes(_NUMBER_BYTES, "big", signed=True))


def _become(wanted: Mapping[str, Any], files: list[int]) -> NoReturn:
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
        if code and code is not end.code:
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):  # what Python does at its end: Prefect sends what it has not sent yet
            threading._shutdown()  # type: ignore[attr-defined]
        with suppress(BaseException):
            atexit._run_exitfuncs()
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run(arguments: list[str], environment: dict[str, str], cwd: str, oom_score: str) -> None:
    with suppress(OSError):
        _OOM_SCORE.write_text(oom_score)
    os.environ.clear()  # all of it: what stayed would lie where the former one did, and there Ray writes its titles
    os.environ.update(environment)
    _write_over(_ENVIRONMENT, _text(environment))
    os.chdir(cwd)
    random.seed()  # two processes with the same jitter would meet again and again
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    threads = environment.get("OMP_NUM_THREADS", "")  # torch read the server's when it was imported
    if (torch := sys.modules.get("torch")) and threads.isdecimal():
        torch.set_num_threads(int(threads))
    first, *others = arguments
    if first.startswith("-m"):
        module = first.removeprefix("-m")
        words = [sys.executable, "-m", module, *others]
        _write_over(_COMMAND, b"".join(os.fsencode(word) + b"\0" for word in words))
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

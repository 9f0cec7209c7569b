"""Processes forked from one that has imported what they need: a second or two of a core in place of nine.

A night, a hundred kills, or the runs of one test file need so many new processes that two cores would do little else
than import. Whoever starts one runs, in place of Python, a caller, which hands arguments, environment and files to a
server of ours, passes SIGTERM and SIGINT on, and ends as the process ends. The process looks from outside like any
other: its own environment is written over the one it was forked with, and so is its command line where it runs a
module, as the product knows its processes by these.

Ray is never imported beforehand, and Prefect only where the server has the worker's settings: both read their settings
once, when they are imported. What Python itself reads when it starts is the server's, so all have one hash seed.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

_NUMBER_BYTES = 8
_FILES = 3
_ENVIRONMENT_ROOM = 16384
"""For the environment of a process, which is longer than the server's."""
_ARGUMENTS_ROOM = 32
START_TIMEOUT_S = 300.0


def forking_python(address: Path) -> str:
    """Return what stands for Python in a command.

    A file of code follows, or `-mMODULE`: as one word, or the caller would look like a process of the module, too.
    """
    return f"{sys.executable} -I -S {__file__} call {address}"


def with_forked_actors(address: Path) -> dict[str, str]:
    """Return the variables of a driver whose actors' processes are forked: its job's runtime environment says so."""
    return {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"py_executable": forking_python(address)}})}


@contextmanager
def warm_processes(address: Path, imported: str, environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Run a server that forks processes.

    Args:
        address: of its socket.
        imported: the module that it imports, with all that this one imports.
        environment: what is read while it imports; each process has its own afterwards.
    """
    import subprocess

    server = subprocess.Popen(
        [sys.executable, "-m", "tests.warm", "serve", str(address), imported, "." * _ARGUMENTS_ROOM],
        env={**environment, "ROOM": "." * _ENVIRONMENT_ROOM, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not address.exists():
            assert server.poll() is None, "the server of processes ended"
            assert time.monotonic() < deadline, f"waited {START_TIMEOUT_S:.0f} s for the server of processes"
            time.sleep(0.05)
        yield
    finally:
        server.kill()
        server.wait()
        address.unlink(missing_ok=True)


def call(address: str, arguments: list[str]) -> int:
    """Have a process forked, and end as it ends.

    Raises:
        ConnectionError: if nobody says how it ended.
    """
    words = json.dumps({"arguments": arguments, "environment": dict(os.environ), "cwd": os.getcwd()}).encode()
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())  # a handler that passed one on would not be run if it came just before a wait
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [len(words).to_bytes(_NUMBER_BYTES, "big")], range(_FILES))
        server.sendall(words)
        process = _number(server)
        while woken in select.select([server, woken], [], [])[0]:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(process, woken.recv(1)[0])
        status = _number(server)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _number(server: socket.socket) -> int:
    if not (found := server.recv(_NUMBER_BYTES)):
        raise ConnectionError("the server of processes does not say what became of one")
    return int.from_bytes(found, "big", signed=True)


def serve(address: str, imported: str) -> None:
    """Fork a process for everyone who calls, until this process is ended."""
    importlib.import_module(imported)
    assert "ray" not in sys.modules
    _share_certificates()
    _complete_models()
    for each in weakref.finalize._registry:
        each.atexit = False  # what this process made is not for others to take down
    gc.freeze()  # what all share is not looked through, and so not copied, each time one collects its garbage
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody is waited for here
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.new")
        listener.listen(64)
        os.rename(f"{address}.new", address)
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


def _share_certificates() -> None:
    """Read the 140 certificates of certifi here: each client of Prefect reads them, though its server has none."""
    import ssl

    import certifi

    known, usual = ssl.create_default_context, {"cafile": certifi.where()}
    context = known(**usual)
    ssl.create_default_context = lambda *args, **given: context if given == usual else known(*args, **given)


def _complete_models() -> None:
    """Build the models of pydantic that each process would build at their first use."""
    pydantic = sys.modules.get("pydantic")
    models = [pydantic.BaseModel] if pydantic else []
    while models:
        model = models.pop()
        models += model.__subclasses__()
        with suppress(Exception):  # some never can be
            model.model_rebuild()


def _watch(caller: socket.socket) -> NoReturn:
    """Fork the process, and tell the caller how it ended, whoever ended it; it does not outlive a caller's kill."""
    length, files, *_ = socket.recv_fds(caller, _NUMBER_BYTES, _FILES)
    words = bytearray()
    while len(words) < int.from_bytes(length, "big"):
        if not (piece := caller.recv(1 << 16)):
            os._exit(1)  # the caller was killed
        words += piece
    process = os.fork()
    if process == 0:
        caller.close()
        _process(bytes(words), files)
    for file in files:
        os.close(file)
    _tell(caller, process)
    ended = os.pidfd_open(process)
    if ended not in select.select([caller, ended], [], [])[0]:
        os.kill(process, signal.SIGKILL)  # the caller was killed
    _, status = os.waitpid(process, 0)
    _tell(caller, os.waitstatus_to_exitcode(status))
    os._exit(0)


def _tell(caller: socket.socket, number: int) -> None:
    with suppress(OSError):  # the caller was killed
        caller.sendall(number.to_bytes(_NUMBER_BYTES, "big", signed=True))


def _process(words: bytes, files: list[int]) -> NoReturn:
    """Be the process that a caller wants."""
    code = 1
    try:
        os.setsid()  # Ray kills the whole group of a worker
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        _run(**json.loads(words))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with suppress(BaseException):  # what Python does at its end: Prefect sends what it has not sent yet
            threading._shutdown()
            atexit._run_exitfuncs()
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run(arguments: list[str], environment: dict[str, str], cwd: str) -> None:
    import random
    import runpy

    os.environ.clear()  # and not item by item: titles that Ray gives would lie where the former environment did
    os.environ.update(environment)
    _write_over(50, [f"{name}={value}" for name, value in environment.items()])
    os.chdir(cwd)
    random.seed()  # two processes with the same jitter would meet again and again
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count())))  # read when it was imported
    first = arguments[0]
    if first.startswith("-m"):
        module = first.removeprefix("-m")
        _write_over(48, [sys.executable, "-m", module, *arguments[1:]])
        sys.argv, sys.path[0] = [module, *arguments[1:]], cwd
        sys.modules.pop(module, None)
        runpy.run_module(module, run_name="__main__")
    else:
        sys.argv, sys.path[0] = arguments, os.path.dirname(first)
        runpy.run_path(first, run_name="__main__")


def _write_over(field: int, parts: list[str]) -> None:
    """Write over what others see of this process: its command line, or its environment.

    Args:
        field: of /proc/PID/stat, as its manual page counts: where that begins. The next field is where it ends.
        parts: what to write.
    """
    import ctypes

    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    start, end = int(fields[field - 3]), int(fields[field - 2])
    text = b"".join(part.encode() + b"\0" for part in parts)
    if len(text) > end - start:
        raise ValueError(f"{len(text)} bytes do not fit into {end - start}; make more room")
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    _, verb, where, *rest = sys.argv
    sys.exit(call(where, rest) if verb == "call" else serve(where, rest[0]))

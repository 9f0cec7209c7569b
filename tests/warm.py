"""Processes forked from one that has imported what they need: a second or two of a core in place of nine.

A night, a hundred kills, or the runs of one test file need so many new processes that two cores would do little else
than import. Whoever starts them runs, in place of Python, a caller, which hands arguments, environment and files to a
server of ours, passes signals on, and ends as the process ends. That one looks, from outside, like any other: its
environment is written over the one it was forked with, and a module's name on its command line, as the product knows
its processes by these. What reads its settings once, when it is imported, as Prefect and Ray do, is imported beforehand
only by a server that has the settings of all.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

_LENGTH_BYTES = 8
_FILES = 3
_ENVIRONMENT_ROOM = 16384
"""For the environment of a process, which is longer than the server's."""
_MODULE_ROOM = len("prefect.engine")
START_TIMEOUT_S = 300.0


def python(address: Path) -> str:
    """Return what stands for Python in a command: arguments of Python follow, a file of code or `-m` and a module."""
    return f"{sys.executable} -I -S {__file__} call {address}"


def actors(address: Path) -> dict[str, str]:
    """Return the variables of a driver whose actors' processes are forked: its job's runtime environment says so."""
    return {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"py_executable": python(address)}})}


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
        [sys.executable, "-m", "tests.warm", "serve", str(address), imported, "." * _MODULE_ROOM],
        env={**environment, "ROOM": "." * _ENVIRONMENT_ROOM, "SPT_NOENV": "1"},  # Ray's titles leave the environment
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
    """Have a process forked, and end as it ends."""
    words = json.dumps({"arguments": arguments, "environment": dict(os.environ), "cwd": os.getcwd()}).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [len(words).to_bytes(_LENGTH_BYTES, "big")], range(_FILES))
        server.sendall(words)
        process = int.from_bytes(server.recv(_LENGTH_BYTES), "big")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda told, _: os.kill(process, told))
        status = int.from_bytes(server.recv(_LENGTH_BYTES), "big", signed=True)  # a signal does not end the wait
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def serve(address: str, imported: str) -> None:
    """Fork a process for everyone who calls, until this process is ended."""
    importlib.import_module(imported)
    assert "ray" not in sys.modules
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
                _watch(caller)
            caller.close()


def _watch(caller: socket.socket) -> NoReturn:
    """Fork the process, and tell the caller how it ended, whoever ended it; it does not outlive a caller's kill."""
    length, files, *_ = socket.recv_fds(caller, _LENGTH_BYTES, _FILES)
    words = bytearray()
    while len(words) < int.from_bytes(length, "big"):
        words += caller.recv(1 << 16)
    process = os.fork()
    if process == 0:
        caller.close()
        _process(json.loads(words), files)
    for file in files:
        os.close(file)
    caller.sendall(process.to_bytes(_LENGTH_BYTES, "big"))
    ended = os.pidfd_open(process)
    if ended not in select.select([caller, ended], [], [])[0]:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    with suppress(OSError):  # the caller was killed
        caller.sendall(os.waitstatus_to_exitcode(status).to_bytes(_LENGTH_BYTES, "big", signed=True))
    os._exit(0)


def _process(wanted: dict[str, Any], files: list[int]) -> NoReturn:
    import random
    import runpy

    os.setsid()  # Ray kills the whole group of a worker
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    arguments, environment = wanted["arguments"], wanted["environment"]
    os.environ.clear()
    os.environ.update(environment)
    _write_environment(environment)
    os.chdir(wanted["cwd"])
    random.seed()  # two processes with the same jitter would meet again and again
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count())))  # read when it was imported
    code = 1
    try:
        if arguments[0] == "-m":
            _write_arguments([sys.executable, *arguments])
            sys.argv = arguments[1:]
            sys.modules.pop(sys.argv[0], None)
            runpy.run_module(sys.argv[0], run_name="__main__")
        else:
            sys.argv = arguments
            sys.path.insert(0, os.path.dirname(sys.argv[0]))
            runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _write_arguments(arguments: list[str]) -> None:
    """Write over the command line that others see of this process."""
    _write_over(48, arguments)


def _write_environment(environment: Mapping[str, str]) -> None:
    """Write over the environment that others see of this process."""
    _write_over(50, [f"{name}={value}" for name, value in environment.items()])


def _write_over(field: int, parts: list[str]) -> None:
    """Write over a part of this process's memory.

    Args:
        field: of /proc/PID/stat, as its manual page counts: where the part begins. The next one is where it ends.
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

"""Ray's worker processes forked from one that has imported torch and transformers: a second of work in place of nine.

A hundred kills need two hundred new processes, and two cores would do little else than import. An actor's runtime
environment names what its worker is run with: here, a caller that hands arguments, environment and files to a server
of ours, and stays until the worker that was forked for it ends. All else about the worker is Ray's own; it is a process
that dies as any other. Nothing of Ray is imported beforehand: it reads its settings once, from the environment.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LENGTH_BYTES = 8
_FILES = 3
_NO_MARK = "0" * 32
"""Stands in the server's environment where a cluster's mark will: a process's own is laid out once, when it begins."""
_MARK = "RLHF_CLUSTER"
_PRELOADED = (
    "tasks.ppo_models",
    "rlhf_core.ppo.learner",
    "rlhf_core.rollout.experience",
    "rlhf_core.models.lora",
    "rlhf_core.models.loading",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)
START_TIMEOUT_S = 300.0


def executable(address: str) -> str:
    """Return what runs a worker, as a runtime environment's `py_executable`."""
    return f"{sys.executable} -I -S {__file__} call {address}"


@contextmanager
def warm_workers() -> Iterator[str]:
    """Run a server; yield its address."""
    import subprocess

    with tempfile.TemporaryDirectory(prefix="ww") as folder:
        address = f"{folder}/s"
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.warm_workers", "serve", address],
            env={**os.environ, _MARK: _NO_MARK, "SPT_NOENV": "1"},
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not os.path.exists(address):
                assert server.poll() is None, "the server of workers ended"
                assert time.monotonic() < deadline, f"waited {START_TIMEOUT_S:.0f} s for the server of workers"
                time.sleep(0.05)
            yield address
        finally:
            server.kill()
            server.wait()


def call(address: str, arguments: list[str]) -> int:
    """Have a worker forked, and wait until it ends."""
    words = json.dumps({"arguments": arguments, "environment": dict(os.environ), "cwd": os.getcwd()}).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [len(words).to_bytes(_LENGTH_BYTES, "big")], range(_FILES))
        server.sendall(words)
        server.recv(1)
    return 0


def serve(address: str) -> None:
    """Fork a worker for everyone who calls, until this process is ended."""
    import importlib
    import signal

    for name in _PRELOADED:
        importlib.import_module(name)
    assert "ray" not in sys.modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody is waited for
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        while True:
            caller, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                os.setpgid(0, 0)  # Ray kills the whole group of a worker
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _work(caller)
            caller.close()


def _work(caller: socket.socket) -> None:
    import runpy

    length, files, *_ = socket.recv_fds(caller, _LENGTH_BYTES, _FILES)
    words = bytearray()
    while len(words) < int.from_bytes(length, "big"):
        words += caller.recv(1 << 16)
    wanted = json.loads(words)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    _bear_mark(os.environ[_MARK])
    os.chdir(wanted["cwd"])
    sys.argv = wanted["arguments"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        os._exit(code)


def _bear_mark(mark: str) -> None:
    """Write the mark into what others see of this process's environment, by which the cluster finds its processes."""
    import ctypes
    from pathlib import Path

    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[47:49])
    place = ctypes.string_at(start, end - start).index(f"{_MARK}={_NO_MARK}".encode())
    ctypes.memmove(start + place + len(_MARK) + 1, mark.encode(), len(mark))


if __name__ == "__main__":
    _, verb, where, *rest = sys.argv
    sys.exit(call(where, rest) if verb == "call" else serve(where))

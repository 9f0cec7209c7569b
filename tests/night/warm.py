"""Flow processes forked from one that has imported what a night imports: two seconds of a core in place of nine.

The worker is the real one, and runs for most sites the command that a deployment names in its job variables: a caller,
which hands environment and files to a server of ours, passes signals on, and ends as the flow's process ends. That one
looks, from outside, like any other: its environment and its command line are written over those it was forked with, as
`rlhf up` and `rlhf down` know flows by them. Some sites start cold, as production does.
"""

from __future__ import annotations

import gc
import json
import os
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
_ROOM = 16384
"""For the environment of a flow, which is longer than that of the server."""
ENGINE = "prefect.engine"
START_TIMEOUT_S = 120.0


def command(address: Path) -> str:
    """Return what runs a flow, as a deployment's job variable."""
    return f"{sys.executable} -I -S {__file__} call {address}"


@contextmanager
def warm_flows(address: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Run a server that forks flows.

    Args:
        address: of its socket.
        environment: a worker's, with all settings of Prefect: a process reads them once, when it imports Prefect.
    """
    import subprocess

    server = subprocess.Popen(
        [sys.executable, "-m", "tests.night.warm", "serve", str(address), "." * len(ENGINE)],
        env={**environment, "NIGHT_ROOM": "." * _ROOM},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not address.exists():
            assert server.poll() is None, "the server of flows ended"
            assert time.monotonic() < deadline, f"waited {START_TIMEOUT_S:.0f} s for the server of flows"
            time.sleep(0.05)
        yield
    finally:
        server.kill()
        server.wait()


def call(address: str) -> int:
    """Have a flow forked, and end as it ends."""
    words = json.dumps({"environment": dict(os.environ), "cwd": os.getcwd()}).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [len(words).to_bytes(_LENGTH_BYTES, "big")], range(_FILES))
        server.sendall(words)
        flow = int.from_bytes(server.recv(_LENGTH_BYTES), "big")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda told, _: os.kill(flow, told))
        status = int.from_bytes(server.recv(_LENGTH_BYTES), "big", signed=True)  # a signal does not end the wait
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def serve(address: str) -> None:
    """Fork a flow for everyone who calls, until this process is ended."""
    import prefect.engine
    import prefect.flow_engine

    import infra.artifacts.s3_requests
    import tasks.ppo_keeper
    import tests.night.stages
    from tasks.source import source_digest

    source_digest()  # what it finds of the core is remembered
    del prefect, infra, tasks, tests
    gc.freeze()  # what all share is not looked through, and so not copied, each time a flow collects its garbage
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
    """Fork the flow, and tell the caller how it ended, whoever ended it."""
    length, files, *_ = socket.recv_fds(caller, _LENGTH_BYTES, _FILES)
    words = bytearray()
    while len(words) < int.from_bytes(length, "big"):
        words += caller.recv(1 << 16)
    flow = os.fork()
    if flow == 0:
        caller.close()
        _flow(json.loads(words), files)
    for file in files:
        os.close(file)
    caller.sendall(flow.to_bytes(_LENGTH_BYTES, "big"))
    _, status = os.waitpid(flow, 0)
    with suppress(OSError):  # the caller was killed
        caller.sendall(os.waitstatus_to_exitcode(status).to_bytes(_LENGTH_BYTES, "big", signed=True))
    os._exit(0)


def _flow(wanted: dict[str, Any], files: list[int]) -> NoReturn:
    import random
    import runpy

    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    _look_like([sys.executable, "-m", ENGINE], wanted["environment"])
    os.chdir(wanted["cwd"])
    random.seed()  # two flows with the same jitter would meet again and again
    sys.argv = [ENGINE]
    sys.modules.pop(ENGINE)
    code = 1
    try:
        runpy.run_module(ENGINE, run_name="__main__")
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


def _look_like(arguments: list[str], environment: Mapping[str, str]) -> None:
    """Write over what others see of this process: its command line and its environment."""
    import ctypes

    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    for (start, end), parts in (
        ((int(fields[45]), int(fields[46])), arguments),
        ((int(fields[47]), int(fields[48])), [f"{name}={value}" for name, value in environment.items()]),
    ):
        text = b"".join(part.encode() + b"\0" for part in parts)
        room = end - start
        if len(text) > room:
            raise ValueError(f"{len(text)} bytes do not fit into {room}; enlarge _ROOM")
        ctypes.memmove(start, text.ljust(room, b"\0"), room)


if __name__ == "__main__":
    _, verb, where, *_ = sys.argv
    sys.exit(call(where) if verb == "call" else serve(where))

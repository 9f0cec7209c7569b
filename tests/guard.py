"""Servers that tests and benchmarks start end with them, also where they are killed and can end nothing themselves.

Every process inherits a mark in its environment. A guard, a process of its own, reads a pipe whose other end only we
hold: when we are gone, however that came, the pipe ends, and the guard kills all that bears the mark.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

MARK = "TESTS_GUARDED"
_standing: list[subprocess.Popen[bytes]] = []
"""The guard of this process; a process that was forked from it relies on the same one."""


def stand_guard() -> None:
    """Have all that this process starts from now on killed when it ends; more calls change nothing.

    On Linux alone: another system does not tell what stands in a process's environment.
    """
    if _standing or sys.platform != "linux":
        return
    bare = {name: value for name, value in os.environ.items() if name != MARK}  # nobody's guard kills a guard
    os.environ[MARK] = mark = uuid4().hex
    program = [sys.executable, "-I", "-S", __file__, mark]
    _standing.append(subprocess.Popen(program, env=bare, stdin=subprocess.PIPE, start_new_session=True))


def _kill_all(mark: str) -> None:
    wanted = f"{MARK}={mark}".encode()
    while marked := [pid for pid in os.listdir("/proc") if pid.isdigit() and _is_marked(pid, wanted)]:
        for pid in marked:  # again, until nobody is left who could start another
            with suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        time.sleep(0.05)


def _is_marked(pid: str, wanted: bytes) -> bool:
    try:
        return wanted in Path("/proc", pid, "environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return False


if __name__ == "__main__":
    sys.stdin.buffer.read()
    _kill_all(sys.argv[1])

"""Servers that tests and benchmarks start end with them, also where they are killed and can end nothing themselves.

Every process inherits a mark in its environment. A guard, a process of its own, reads a pipe whose other end only we
hold: when we are gone, however that came, the pipe ends, and the guard kills all that bears the mark.

The files of killed tests go as those of any former session do, and not days later: the guard takes back their lock.
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


def stand_guard(lock: Path | None = None) -> None:
    """Have all that this process starts from now on killed when it ends; more calls change nothing.

    On Linux alone: another system does not tell what stands in a process's environment.

    Args:
        lock: a file that holds our process id and is to go with us: pytest's, on the directory of our files.
    """
    if _standing or sys.platform != "linux":
        return
    bare = {name: value for name, value in os.environ.items() if name != MARK}  # nobody's guard kills a guard
    os.environ[MARK] = mark = uuid4().hex
    program = [sys.executable, "-I", "-S", __file__, mark, str(os.getpid()), *([str(lock)] if lock else [])]
    _standing.append(subprocess.Popen(program, env=bare, stdin=subprocess.PIPE, start_new_session=True))


def _kill_all(mark: str) -> None:
    wanted = f"{MARK}={mark}".encode()
    while marked := [pid for pid in os.listdir("/proc") if pid.isdigit() and _is_marked(pid, wanted)]:
        for pid in marked:  # again, until nobody is left who could start another
            with suppress(ProcessLookupError):
                os.kill(int(pid), 9)
        time.sleep(0.05)


def unlock(lock: Path, owner: str) -> None:
    """Remove a lock if it is this owner's: a process, by its id."""
    with suppress(OSError):  # it went with its owner, as it should
        if lock.read_text() == owner:  # else another session's, which has that name by now
            lock.unlink()


def _is_marked(pid: str, wanted: bytes) -> bool:
    try:
        return wanted in Path("/proc", pid, "environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return False


if __name__ == "__main__":
    _, given_mark, given_owner, *locks = sys.argv
    sys.stdin.buffer.read()
    for each in locks:
        unlock(Path(each), given_owner)
    _kill_all(given_mark)

"""Processes that outlive the command that started them: started, measured, ended; and their logs."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from infra.process_record import is_live, marked_processes

STACK_VARIABLE = "RLHF_STACK"
"""A variable in the environment of every process of a stack, also of those of its runs."""


def spawn(command: Sequence[str], *, environment: Mapping[str, str], cwd: Path, log: Path) -> psutil.Process:
    """Start a program in its own session, with its output in a log file; the former log is kept as `.1`.

    Raises:
        OSError: if it cannot be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists():
        log.replace(log.with_name(f"{log.name}.1"))
    with log.open("ab") as output, _interrupts_heard():
        child = subprocess.Popen(  # it goes on without us
            command,
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return psutil.Process(child.pid)


def begin_log_anew(log: Path, *, limit_bytes: int) -> bool:
    """Let a log that has grown to a limit begin anew, and keep its end as `.1`; return whether that was done.

    Its writers go on with the same file, to which they append. What they write between the two steps is lost. Of two
    callers at once, one does it.

    Raises:
        OSError: if there is no such file, or no room for the end.
    """
    if log.stat().st_size < limit_bytes:
        return False
    former = log.with_name(f"{log.name}.1")
    partial = former.with_name(f".{former.name}")
    with log.open("r+b") as whole:
        fcntl.flock(whole, fcntl.LOCK_EX)  # until it is closed; writers ask for no lock
        if os.fstat(whole.fileno()).st_size < limit_bytes:
            return False
        partial.touch(mode=0o600)
        with partial.open("wb") as end:
            whole.seek(-limit_bytes, os.SEEK_END)
            whole.readline()  # most of it is cut off
            shutil.copyfileobj(whole, end)
        partial.replace(former)
        whole.truncate(0)  # by its descriptor: a service that starts meanwhile has given the name to a new file
    return True


@contextmanager
def _interrupts_heard() -> Iterator[None]:
    """Have what is started here hear SIGINT, also where this process ignores it, as a shell's background jobs do.

    Prefect's worker sends itself that signal when it is asked to end, and would go on until it is killed.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def marked(stack_id: str) -> list[psutil.Process]:
    """Return the live processes of a stack, except this one and its ancestors."""
    found = marked_processes(STACK_VARIABLE, stack_id)
    ours = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return [process for process in found if process.pid not in ours]


def tree(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and all that descend from it."""
    with suppress(psutil.Error):
        return [process, *process.children(recursive=True)]
    return [process]


def end(processes: Iterable[psutil.Process], *, grace_s: float, kill_timeout_s: float = 10.0) -> list[psutil.Process]:
    """Ask processes to end, kill those that have not within the grace time, and return those that are still left."""
    asked = [process for process in processes if is_live(process)]
    for process in asked:
        with suppress(psutil.Error):
            process.terminate()
    left = _await_end(asked, grace_s)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    return _await_end(left, kill_timeout_s)


def _await_end(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Return those that still live after the timeout; return earlier when none does.

    psutil's own function waits for zombies too, which stay for ever if process 1 does not collect them.
    """
    deadline = time.monotonic() + timeout_s
    while (left := [process for process in processes if is_live(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in processes:
        if process not in left:
            with suppress(psutil.Error):
                process.wait(0)  # collects a child of ours
    return left


def memory_bytes(processes: Iterable[psutil.Process]) -> int:
    """Return the sum of proportional set sizes: pages shared by n processes count 1/n in each."""
    total = 0
    for process in processes:
        with suppress(psutil.Error, OSError):
            total += process.memory_full_info().pss if sys.platform == "linux" else process.memory_info().rss
    return total

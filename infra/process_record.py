"""Processes that are not our children: named for ever, found by a variable in their environment, described.

An id alone is given to another process some day, and the wall clock is set while processes run. So a process is known
by its id, the boot of the machine, and the time from that boot to its start.
"""

from __future__ import annotations

import os
import platform
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil
from pydantic import BaseModel, ConfigDict, Field

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def _boot() -> str:
    """Return the id of this boot of the machine; nothing where the system has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def here() -> str:
    """Return what two processes share when the id of one means the same process to the other.

    That is the boot of the machine and the namespace of its process ids: a container has its own, in which the ids of
    another mean nothing. A namespace's number is given again only when all processes in it are gone. If the system has
    no id of its boot, the machine's name and network address replace it, because the first namespace has the same
    number everywhere.
    """
    with suppress(OSError):
        return f"{_boot() or _machine()}/{os.readlink('/proc/self/ns/pid')}"
    return _machine()


def _machine() -> str:
    return f"{platform.node()}/{uuid.getnode():012x}"


class ProcessRecord(BaseModel):
    """One process, recognised as long as it lives, and never taken for another."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    pid: int
    started: float
    """Ticks of the clock since boot; where the system does not tell them, seconds since the epoch."""
    boot: str = Field(default_factory=_boot)
    """Which boot: after another one, the same id may start at the same tick."""

    @classmethod
    def of(cls, pid: int) -> Self:
        """Record a running process.

        Raises:
            psutil.NoSuchProcess: if there is none of this id.
        """
        return cls(pid=pid, started=_start_time(pid))

    def process(self) -> psutil.Process | None:
        """Return the process if it still is the recorded one and has not ended (a zombie has)."""
        try:
            process = psutil.Process(self.pid)
            same = _start_time(self.pid) == self.started and self.boot == _boot()
        except psutil.Error:
            return None
        return process if same and is_live(process) else None


def is_live(process: psutil.Process) -> bool:
    """Whether a process still runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def marked_processes(variable: str, mark: str) -> list[psutil.Process]:
    """Return the live processes with this value of a variable in their environment, which children inherit."""
    return [process for process in psutil.process_iter() if _value(process, variable) == mark and is_live(process)]


def describe(process: psutil.Process) -> str:
    """Return the id and the name of a process, for messages."""
    try:
        return f"{process.pid} ({process.name()})"
    except psutil.Error:
        return f"{process.pid} (gone since)"


def _value(process: psutil.Process, variable: str) -> str | None:
    try:
        return process.environ().get(variable)
    except (psutil.Error, OSError):  # gone, a zombie, or another user's
        return None


def _start_time(pid: int) -> float:
    """Return when a process started: since boot where the system tells it, else since the epoch.

    The time since boot does not move when the clock is set, and a live owner must never look dead.
    """
    try:
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return psutil.Process(pid).create_time()

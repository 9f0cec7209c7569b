"""Directories for what is written before it is stored: under RLHF_HOME, and gone with their process."""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from infra.process_record import ProcessRecord, here

FAILED_BATCHES = "failed-batches"
"""Directory under RLHF_HOME for what a person looks at; `tasks.tidy` deletes it after a while."""
_STILL_S = 30 * 24 * 3600.0
"""Of another machine, container or boot it cannot be known who lives: what nobody changed for so long is nobody's."""


@contextmanager
def scratch_directory(home: Path) -> Iterator[Path]:
    """Yield an empty directory that is removed afterwards; also removes those whose process was killed.

    Args:
        home: RLHF_HOME; models are too large for the system's folder of temporary files. Machines and containers may
            share it: each has a folder there.
    """
    remove_left(home)
    root = _root(home)
    root.mkdir(parents=True, exist_ok=True)
    owner = ProcessRecord.of(os.getpid())
    with TemporaryDirectory(prefix=f"{owner.pid}-{owner.started}-", dir=root) as directory:
        yield Path(directory)


def remove_left(home: Path) -> list[Path]:
    """Remove the directories whose process was killed, and return those that are gone.

    Args:
        home: RLHF_HOME.
    """
    scratch = home / "scratch"
    left = removed(each for each in scratch.glob("*/*") if not _has_owner(each))
    for folder in scratch.glob("*"):
        if _is_still(folder):
            with suppress(OSError):  # it is not empty
                folder.rmdir()
    return left


def removed(paths: Iterable[Path]) -> list[Path]:
    """Delete files and directories, and return those that are gone; what cannot be deleted stays."""
    asked = list(paths)
    for each in asked:
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each, ignore_errors=True)
        else:
            with suppress(OSError):
                each.unlink()
    return [each for each in asked if not os.path.lexists(each)]


def _root(home: Path) -> Path:
    """Return the folder of those processes of which this one can tell whether they live."""
    return home / "scratch" / re.sub(r"\W+", "-", here()).strip("-")


def _has_owner(directory: Path) -> bool:
    folder = directory.parent
    with suppress(ValueError):  # it has no name that we give
        if folder == _root(folder.parent.parent):
            pid, started, _ = directory.name.split("-")
            return ProcessRecord(pid=int(pid), started=float(started)).process() is not None
        if folder.name == socket.gethostname():  # of a former release
            return psutil.pid_exists(int(directory.name.partition("-")[0]))
        return not _is_still(directory)
    return False


def _is_still(path: Path) -> bool:
    """Return whether nobody has changed a file or directory for long."""
    try:
        return time.time() - path.stat().st_mtime >= _STILL_S
    except FileNotFoundError:
        return False

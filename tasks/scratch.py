"""Directories for what is written before it is stored: under RLHF_HOME, and gone with their process."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

FAILED_BATCHES = "failed-batches"
"""Directory under RLHF_HOME for what a person looks at; `tasks.tidy` deletes it after a while."""
_LATE_S = 60.0
"""A process that began so long after a directory was written last did not write it: it has the owner's number."""


@contextmanager
def scratch_directory(home: Path) -> Iterator[Path]:
    """Yield an empty directory that is removed afterwards; also removes those whose process was killed.

    Args:
        home: RLHF_HOME; models are too large for the system's folder of temporary files. Machines may share it: each
            has a folder there.
    """
    root = _root(home)
    root.mkdir(parents=True, exist_ok=True)
    remove_left(home)
    with TemporaryDirectory(prefix=f"{os.getpid()}-", dir=root) as directory:
        yield Path(directory)


def remove_left(home: Path) -> list[Path]:
    """Remove the directories of this machine whose process was killed, and return what they were.

    Args:
        home: RLHF_HOME.
    """
    left = [each for each in _root(home).glob("*") if not _has_owner(each)]
    for each in left:
        shutil.rmtree(each, ignore_errors=True)
    return left


def _root(home: Path) -> Path:
    return home / "scratch" / socket.gethostname()


def _has_owner(directory: Path) -> bool:
    owner = directory.name.partition("-")[0]
    try:
        return owner.isdigit() and psutil.Process(int(owner)).create_time() < directory.stat().st_mtime + _LATE_S
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False

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


@contextmanager
def scratch_directory(home: Path) -> Iterator[Path]:
    """Yield an empty directory that is removed afterwards; also removes those whose process was killed.

    Args:
        home: RLHF_HOME; models are too large for the system's folder of temporary files. Machines may share it: each
            has a folder there.
    """
    root = home / "scratch" / socket.gethostname()
    root.mkdir(parents=True, exist_ok=True)
    for left in root.iterdir():
        owner = left.name.partition("-")[0]
        if not (owner.isdigit() and psutil.pid_exists(int(owner))):
            shutil.rmtree(left, ignore_errors=True)
    with TemporaryDirectory(prefix=f"{os.getpid()}-", dir=root) as directory:
        yield Path(directory)

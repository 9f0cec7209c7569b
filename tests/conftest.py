"""What holds for every test: one thread, a fast place for files, an end for every server, long files first."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.guard import stand_guard

# Before torch is imported. Two workers with a thread for each core wait for each other most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

MEMORY, ROOM_BYTES = Path("/dev/shm"), 4 << 30
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM_BYTES:
    # A store waits for the disk at every write; what it writes is the same elsewhere.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

SLOWEST_FIRST = (
    "test_chain",
    "test_stack",
    "test_ppo_run",
)
"""Files that take minutes; a worker that met one of them last would keep the other waiting."""


def pytest_sessionstart() -> None:
    stand_guard()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; all else stays in its order."""
    rank = {name: place for place, name in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))

"""What holds for every test: one thread, a fast place for files, an end for every server, long files first."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.guard import stand_guard
from tests.warm import warm_processes, with_forked_actors

gc.disable()  # until all tests are collected: what is imported stays, and looking for garbage in it takes two seconds
# Before torch is imported. Several workers with a thread for each core wait for each other most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads of a run that spin until all have come would take the other workers' time: a step takes half of it so.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Ray gives way to all others, so its actors would starve while the other worker tests; and then time is up for them.
os.environ.setdefault("RAY_worker_niceness", "0")

MEMORY, ROOM_BYTES = Path("/dev/shm"), 4 << 30
if MEMORY.is_dir() and min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available) > ROOM_BYTES:
    # A store waits for the disk at every write; what it writes is the same elsewhere.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

FIRST = (
    "test_year",
    "test_night_story",
    "test_chain",
    "test_security",
    "test_stack_mishaps",
    "test_ppo_run",
    "test_server_kills",
    "test_stack",
    "test_clusters",
    "test_train_prompts_on_ray",
)
"""Files of minutes: a worker that met one of them last would keep the other waiting. In this order one worker has most
of the files that share a stack, and the others those that need none. A worker is given its next file as soon as it has
two tests left: a file that shall have a worker to itself for minutes needs three."""


def pytest_sessionstart(session: pytest.Session) -> None:
    stand_guard(session.config._tmp_path_factory.getbasetemp() / ".lock")  # type: ignore[attr-defined]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; all else stays in its order."""
    rank = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()  # two million objects that were imported: a search for garbage among them takes half a second
    gc.enable()


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The address of a server that forks flows, and processes of actors."""
    address = tmp_path_factory.mktemp("warm") / "s"
    with warm_processes(address, "tests.learning_imports"):
        yield address


@pytest.fixture(scope="session")
def forked(warm: Path) -> dict[str, str]:
    """Variables of a driver whose actors' processes are forked, too."""
    return with_forked_actors(warm)

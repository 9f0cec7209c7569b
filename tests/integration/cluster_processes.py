"""Processes that lease clusters, and the wait until nothing of one is left."""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from infra.clusters import ClusterRecord, leftover_processes

GONE_WITHIN_S = 30.0

OWNER = """
import os, sys, time
from pathlib import Path
from infra.clusters import lease_cluster, release_cluster
directory, then, stalled_after_s = sys.argv[1:]
lease_cluster(
    "night", directory=Path(directory), num_cpus=1, object_store_mb=80, stalled_after_s=float(stalled_after_s)
)
if then == "forks" and os.fork() == 0:
    time.sleep(600)  # a child that outlives its parent, and has no business with the lease
    sys.exit()
print("leased", flush=True)
input()
if then == "raises":
    raise RuntimeError("as it may happen")
if then == "releases":
    release_cluster("night")
    print("released", flush=True)
    input()
"""


def run(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


class Owners:
    """Starts processes that lease a cluster each, and leaves nothing of them behind."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[tuple[subprocess.Popen[str], ClusterRecord]] = []
        self.children: list[psutil.Process] = []

    def start(self, then: str = "waits", stalled_after_s: float = 120) -> tuple[subprocess.Popen[str], ClusterRecord]:
        process = run(OWNER, str(self.directory), then, str(stalled_after_s))
        assert says(process) == "leased"
        self.children += psutil.Process(process.pid).children()
        self.started.append((process, ClusterRecord.load(self.directory / "night.json")))
        return self.started[-1]

    def end(self) -> None:
        for child in self.children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        for process, record in self.started:
            process.kill()
            process.communicate()
            wait_until_nothing_is_left(record)


def wait_until_nothing_is_left(record: ClusterRecord) -> None:
    """Fail unless a cluster's processes and files are gone within the 30 s that we promise."""
    path = record.log_dir.parent.parent / f"{record.name}.json"
    deadline = time.monotonic() + GONE_WITHIN_S
    while time.monotonic() < deadline:
        left = leftover_processes(record.mark, record.head)
        if not left and not record.temp_dir.exists() and not (path.exists() and record.mark in path.read_text()):
            return
        time.sleep(0.1)
    pytest.fail(f"after {GONE_WITHIN_S:g} s cluster {record.name!r} has {left}, {record.temp_dir} or {path}")

"""What tests start does not outlive them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from tests.guard import unlock

TESTS = """
import os, subprocess, sys
from pathlib import Path
from tests.guard import stand_guard
lock = Path(sys.argv[1])
lock.write_text(str(os.getpid()))
stand_guard(lock)
stand_guard()
starts_another = "sleep 600 & echo; wait"
server = subprocess.Popen(["sh", "-c", starts_another], stdout=subprocess.PIPE, start_new_session=True)
server.stdout.readline()
print(server.pid, flush=True)
input()
"""


def test_a_server_and_what_it_started_end_when_the_tests_are_killed_and_so_does_their_lock(tmp_path: Path) -> None:
    lock, pipe = tmp_path / ".lock", subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", TESTS, str(lock)], stdin=pipe, stdout=pipe) as tests:
        assert tests.stdout is not None
        server = psutil.Process(int(tests.stdout.readline()))
        started = [server, *server.children()]
        assert len(started) == 2
        tests.kill()
        _, alive = psutil.wait_procs(started, timeout=30)
    assert alive == []
    assert not lock.exists()


def test_a_lock_that_is_anothers_by_now_stays(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    lock.write_text("12")
    for owner, stays in (("1", True), ("12", False), ("12", False)):
        unlock(lock, owner)
        assert lock.exists() == stays

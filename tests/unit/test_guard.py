"""What tests start does not outlive them."""

from __future__ import annotations

import subprocess
import sys

import psutil

TESTS = """
import subprocess, sys
from tests.guard import stand_guard
stand_guard()
stand_guard()
starts_another = "sleep 600 & echo; wait"
server = subprocess.Popen(["sh", "-c", starts_another], stdout=subprocess.PIPE, start_new_session=True)
server.stdout.readline()
print(server.pid, flush=True)
input()
"""


def test_a_server_and_what_it_started_end_when_the_tests_are_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", TESTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tests:
        assert tests.stdout is not None
        server = psutil.Process(int(tests.stdout.readline()))
        started = [server, *server.children()]
        assert len(started) == 2
        tests.kill()
        _, alive = psutil.wait_procs(started, timeout=30)
    assert alive == []

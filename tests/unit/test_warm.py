"""A process that the tests' server forks ends, and looks from outside, as one that Python started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.warm import forking_python, warm_processes

WAITING = """
import atexit, os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started the tests in the background
atexit.register(print, "at the end")
print(os.getpid(), flush=True)
for _ in range(600):  # a signal may come just before a sleep, and does not end it then
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """What stands for Python in a command."""
    address = tmp_path_factory.mktemp("warm") / "s"
    with warm_processes(address, "json"):
        yield forking_python(address).split()


@pytest.fixture
def waiting(python: list[str], tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A caller, and its process, which waits."""
    (tmp_path / "waiting.py").write_text(WAITING)
    caller = subprocess.Popen(
        [*python, "-mwaiting", "for", "ever"],
        cwd=tmp_path,
        env={**os.environ, "ITS_OWN": "yes"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert caller.stdout is not None
    yield caller, psutil.Process(int(caller.stdout.readline()))
    caller.kill()
    caller.wait()
    caller.stdout.close()


@pytest.mark.parametrize(
    ("ending", "code"),
    [("", 0), ("sys.exit(3)", 3), ("raise ValueError", 1), ("os.kill(os.getpid(), 9)", -9)],
)
def test_a_caller_ends_as_its_process_ends(python: list[str], tmp_path: Path, ending: str, code: int) -> None:
    (tmp_path / "ending.py").write_text(f"import os, sys\n{ending}\n")
    ended = subprocess.run([*python, "ending.py"], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert ended.returncode == code


def test_what_python_does_at_its_end_is_done(python: list[str], tmp_path: Path) -> None:
    (tmp_path / "brief.py").write_text(WAITING.replace("600", "0"))
    said = subprocess.run([*python, "brief.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.splitlines()[-1] == "at the end"


def test_a_process_is_known_by_its_module_and_its_own_environment(
    waiting: tuple[subprocess.Popen[str], psutil.Process],
) -> None:
    _, process = waiting
    assert [word for word in process.cmdline()[1:] if word] == ["-m", "waiting", "for", "ever"]
    assert process.environ()["ITS_OWN"] == "yes"
    assert "ROOM" not in process.environ()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 1)])
def test_a_signal_is_passed_on(waiting: tuple[subprocess.Popen[str], psutil.Process], number: int, code: int) -> None:
    caller, process = waiting
    caller.send_signal(number)
    assert caller.wait(timeout=60) == code
    assert not process.is_running()


def test_a_process_does_not_outlive_a_caller_that_is_killed(
    waiting: tuple[subprocess.Popen[str], psutil.Process],
) -> None:
    caller, process = waiting
    caller.kill()
    deadline = time.monotonic() + 60
    while process.is_running():
        assert time.monotonic() < deadline, "the process lives on"
        time.sleep(0.05)

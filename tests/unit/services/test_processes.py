"""Processes are found by their mark, and ended even when they would rather not."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from infra.process_record import is_live
from infra.services import processes

MARK = f"test-{os.getpid()}"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
)
WITH_CHILD = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).wait()"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "logs" / "program.log"
    assert processes.end(processes.marked(MARK), grace_s=0) == []


def spawn(code: str, log: Path) -> psutil.Process:
    environment = {**os.environ, processes.STACK_VARIABLE: MARK}
    return processes.spawn([sys.executable, "-c", code], environment=environment, cwd=log.parents[1], log=log)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"waited 20 s for {what}"
        time.sleep(0.02)


def test_a_started_process_leads_its_own_session_and_writes_to_its_log(log: Path) -> None:
    process = spawn("import os; print('session', os.getsid(0), os.getpid())", log)
    process.wait(timeout=20)
    assert log.read_text().split() == ["session", str(process.pid), str(process.pid)]


def test_a_started_process_hears_an_interrupt_also_where_a_shell_has_us_ignore_it(log: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background job
    try:
        spawn("import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)", log).wait(timeout=20)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert log.read_text() == "False\n"


def test_the_log_before_is_kept_beside_the_new_one(log: Path) -> None:
    for word in ("first", "second"):
        spawn(f"print('{word}')", log).wait(timeout=20)
    assert (log.read_text(), log.with_name("program.log.1").read_text()) == ("second\n", "first\n")


def test_descendants_are_found_by_the_mark_that_they_inherit(log: Path) -> None:
    process = spawn(WITH_CHILD, log)
    wait_for(lambda: len(processes.marked(MARK)) == 2, "parent and child")
    assert {each.pid for each in processes.marked(MARK)} == {each.pid for each in processes.tree(process)}


def test_this_process_is_never_among_the_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "marked_processes", lambda *_: list(psutil.process_iter()))
    assert os.getpid() not in {process.pid for process in processes.marked(MARK)}


def test_a_process_that_ignores_sigterm_is_ended_all_the_same(log: Path) -> None:
    process = spawn(STUBBORN, log)
    wait_for(lambda: log.read_text() == "ready\n", "the handler")
    assert processes.end([process], grace_s=0.2) == []
    assert not is_live(process)


def test_memory_is_that_of_live_processes_alone(log: Path) -> None:
    process = spawn("import time; time.sleep(60)", log)
    assert processes.memory_bytes([process]) > 0
    processes.end([process], grace_s=5)
    assert processes.memory_bytes([process]) == 0

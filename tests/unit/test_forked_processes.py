"""A forked process ends, and looks from outside, as one that Python started, or Python starts it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from infra.forked_processes import forking_python, server_command, server_environment
from infra.process_record import is_live
from infra.settings import CHECKOUT
from tests.warm import warm_processes

WAITING = """
import atexit, os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started the tests in the background
atexit.register(print, "at the end")
child = subprocess.Popen(["sleep", "600"])
atexit.register(child.kill)
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


def test_a_process_does_not_outlive_a_caller_that_is_killed_nor_do_its_children(
    waiting: tuple[subprocess.Popen[str], psutil.Process],
) -> None:
    caller, process = waiting
    [child] = process.children()
    caller.kill()
    deadline = time.monotonic() + 60
    while process.is_running() or is_live(child):
        assert time.monotonic() < deadline, "the process lives on"
        time.sleep(0.05)


def _is_forked(python: list[str], directory: Path, **variables: str) -> bool:
    """Start a process; Python itself has the caller's id."""
    (directory / "who.py").write_text("import os\nprint(os.getpid())\n")
    with (directory / "said").open("w") as said:  # not a pipe: a server that is silent would keep its end open
        caller = subprocess.Popen([*python, "who.py"], cwd=directory, env={**os.environ, **variables}, stdout=said)
        assert caller.wait(timeout=60) == 0
    return int((directory / "said").read_text()) != caller.pid


def test_the_process_is_the_one_that_is_ended_when_memory_is_short(python: list[str], tmp_path: Path) -> None:
    score = "Path('/proc/self/oom_score_adj')"
    (tmp_path / "score.py").write_text(f"from pathlib import Path\nprint({score}.read_text())\n")
    largest = (
        f"from pathlib import Path; import os, sys; {score}.write_text('900'); os.execv(sys.argv[1], sys.argv[1:])"
    )
    said = subprocess.run(
        [sys.executable, "-c", largest, *python, "score.py"], cwd=tmp_path, capture_output=True, timeout=60, check=True
    )
    assert int(said.stdout) == 900


def test_a_process_ends_with_who_watches_it(waiting: tuple[subprocess.Popen[str], psutil.Process]) -> None:
    caller, process = waiting
    watcher = process.parent()
    assert watcher is not None
    watcher.terminate()  # as all processes of a cluster are: it waits for the process
    assert process.is_running()
    watcher.kill()
    assert caller.wait(timeout=60) == 1
    process.wait(timeout=60)


def test_an_environment_that_does_not_fit_makes_the_caller_python(python: list[str], tmp_path: Path) -> None:
    assert _is_forked(python, tmp_path, LARGE="x" * 10_000)
    assert not _is_forked(python, tmp_path, LARGE="x" * 100_000)


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[list[str]]:
    """What stands for Python, if the server does not answer, for a second."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        code = f"""
import sys
from infra import forked_processes
forked_processes._BEGIN_TIMEOUT_S = 1
forked_processes.call({str(tmp_path / "s")!r}, sys.argv[1:])
"""
        yield [sys.executable, "-c", code]


def test_a_server_that_is_silent_makes_the_caller_python(silent: list[str], tmp_path: Path) -> None:
    assert not _is_forked(silent, tmp_path)


def test_a_signal_that_comes_before_a_process_is_there_is_not_lost(silent: list[str], tmp_path: Path) -> None:
    (tmp_path / "who.py").touch()
    caller = subprocess.Popen([*silent, "who.py"], cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not psutil.Process(caller.pid).net_connections("unix"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    caller.send_signal(signal.SIGTERM)
    assert caller.wait(timeout=60) == -signal.SIGTERM


def test_a_server_that_is_gone_makes_the_caller_python(tmp_path: Path) -> None:
    assert not _is_forked(forking_python(tmp_path / "s").split(), tmp_path)


def test_python_too_is_known_by_its_module(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text("import psutil; print(psutil.Process().cmdline()[1:])")
    command = [*forking_python(tmp_path / "s").split(), "-mwords", "of", "its", "own"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.strip() == "['-m', 'words', 'of', 'its', 'own']"


CUDA = "begun = False\nclass cuda:\n    _is_in_bad_fork = staticmethod(lambda: begun)\nset_num_threads = int\n"


@pytest.mark.parametrize(
    ("torch", "is_forked"),
    [(CUDA, True), (CUDA.replace("False", "True"), False), ("raise ImportError", False)],
    ids=["CUDA has not begun", "CUDA has begun", "its imports fail"],
)
def test_what_the_server_imports_decides(tmp_path: Path, torch: str, is_forked: bool) -> None:
    (tmp_path / "torch.py").write_text(torch)
    command = server_command(tmp_path / "s", ["torch"], verb="start")
    environment = server_environment(os.environ) | {"PYTHONPATH": f"{tmp_path}:{CHECKOUT}"}
    with (tmp_path / "log").open("wb") as log:
        subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=60, check=True)
    try:
        assert _is_forked(forking_python(tmp_path / "s").split(), tmp_path) is is_forked
    finally:
        for each in psutil.process_iter():
            with suppress(psutil.Error):
                if str(tmp_path / "s") in each.cmdline():
                    each.kill()


def test_a_server_that_stays_imports_anew_what_was_changed(tmp_path: Path) -> None:
    module = tmp_path / "changing.py"
    module.write_text("VALUE = 1")
    os.utime(module, (1, 1))
    told = "import sys\nfound = 10 * ('changing' in sys.modules)\nimport changing\nsys.exit(found + changing.VALUE)\n"
    (tmp_path / "told.py").write_text(told)
    with warm_processes(tmp_path / "s", "changing", {**os.environ, "PYTHONPATH": str(tmp_path)}):
        caller = [*forking_python(tmp_path / "s").split(), "told.py"]
        call = partial(subprocess.run, caller, cwd=tmp_path, timeout=60, check=False)
        assert call().returncode == 11
        module.write_text("VALUE = 2")
        os.utime(module, (2, 2))
        assert call().returncode == 2  # Python
        deadline = time.monotonic() + 60
        while call().returncode != 12:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_a_server_that_stays_ends_with_who_started_it(tmp_path: Path) -> None:
    command = server_command(tmp_path / "s", [])
    starts = f"import subprocess, time; subprocess.Popen({command!r}); time.sleep(600)"
    environment = server_environment(os.environ) | {"PYTHONPATH": str(CHECKOUT)}
    with subprocess.Popen([sys.executable, "-c", starts], env=environment) as parent:
        deadline = time.monotonic() + 60
        while not (tmp_path / "s").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        [server] = psutil.Process(parent.pid).children()
        parent.kill()
    server.wait(timeout=60)


def test_a_system_on_which_processes_cannot_be_watched_has_no_server(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\ndel os.pidfd_open\n")
    environment = server_environment(os.environ) | {"PYTHONPATH": f"{tmp_path}:{CHECKOUT}"}
    started = subprocess.run(
        server_command(tmp_path / "s", [], verb="start"), env=environment, capture_output=True, timeout=60, check=False
    )
    assert started.returncode == 1
    assert not (tmp_path / "s").exists()

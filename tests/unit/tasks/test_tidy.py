"""What is deleted of RLHF_HOME, and what stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from infra.settings import settings
from tasks.scratch import remove_left, scratch_directory
from tasks.tidy import tidy

DAY_S = 24 * 3600.0
GONE = 2**22 + 1
"""No process has this id: it is more than the most that a system gives."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RLHF_STORE_URL", (tmp_path / "store").as_uri())
    return tmp_path / "home"


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY_S
    os.utime(path, (then, then))


def test_what_a_killed_process_was_writing_goes_and_what_a_live_one_writes_stays(home: Path) -> None:
    with scratch_directory(home) as ours, subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as other:
        root = ours.parent
        theirs, left, anothers = root / f"{other.pid}-a", root / f"{GONE}-b", root / f"{os.getpid()}-c"
        for each in (theirs, left, anothers):
            each.mkdir()
        began = psutil.Process().create_time()
        os.utime(anothers, (began - DAY_S, began - DAY_S))  # of one that had our number before
        assert set(remove_left(home)) == {left, anothers}
        assert set(root.iterdir()) == {ours, theirs}
        other.kill()
    remove_left(home)
    assert list(root.iterdir()) == []


def test_tidying_deletes_old_batches_and_shortens_long_logs_and_says_so(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_BATCHES_KEPT_DAYS", "3")
    monkeypatch.setenv("RLHF_LOG_LIMIT_MB", "0.1")
    monkeypatch.setenv("RLHF_RETENTION", "policy=5")
    old, new = home / "failed-batches" / "old", home / "failed-batches" / "new"
    for each in (old, new):
        each.mkdir(parents=True)
        (each / "batch.json").touch()
    age(old, 4)
    age(new, 2)
    (home / "logs").mkdir()
    log, short = home / "logs" / "server.log", home / "logs" / "worker.log"
    log.write_text("a line\n" * 100_000)
    short.write_text("a line\n")
    said: list[str] = []
    tidy(settings(), said.append)
    assert [each.name for each in (home / "failed-batches").iterdir()] == ["new"]
    assert (log.stat().st_size, short.read_text()) == (0, "a line\n")
    assert (home / "logs" / "server.log.1").stat().st_size <= 100_000
    assert any("server.log was long" in line for line in said)
    assert "deleted 1 batch older than 3 days in failed-batches" in said
    assert said[-1].startswith("the store gave back 0.0 MB: 0 versions and 0 blobs")

"""What is deleted of RLHF_HOME, and what stays."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra.process_record import ProcessRecord
from infra.settings import settings
from tasks import scratch
from tasks.scratch import remove_left, scratch_directory
from tasks.tidy import remove_old_batches, tidy

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
        root, began = ours.parent, ProcessRecord.of(other.pid).started
        theirs, left = root / f"{other.pid}-{began}-a", root / f"{GONE}-{began}-b"
        formers = root / f"{other.pid}-{began - 1}-c"  # of one that had the number before
        for each in (theirs, left, formers):
            each.mkdir()
            age(each, 100)  # no clock is asked: it may have been set
        assert set(remove_left(home)) == {left, formers}
        assert set(root.iterdir()) == {ours, theirs}
        other.kill()
    remove_left(home)
    assert list(root.iterdir()) == []


def test_of_a_former_release_what_has_the_number_of_a_live_process_stays(home: Path) -> None:
    live, left = (home / "scratch" / socket.gethostname() / f"{pid}-a" for pid in (os.getpid(), GONE))
    for each in (live, left):
        each.mkdir(parents=True)
        age(each, 100)
    assert remove_left(home) == [left]
    assert live.is_dir()


def test_what_another_container_or_boot_was_writing_stays_until_nobody_changed_it_for_a_month(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "here", lambda: "this boot/pid:[4026532000]")
    theirs, left = (home / "scratch" / "this-boot-pid-4026531999" / f"{GONE}-{name}" for name in "ab")
    for each in (theirs, left):
        each.mkdir(parents=True)
    age(left, 31)
    with scratch_directory(home) as ours:
        assert ours.parent.name == "this-boot-pid-4026532000"
        assert list(theirs.parent.iterdir()) == [theirs]
    for each in (theirs, theirs.parent):
        age(each, 31)
    assert remove_left(home) == [theirs]
    age(theirs.parent, 31)
    remove_left(home)
    assert list((home / "scratch").iterdir()) == [ours.parent]


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


def test_of_old_batches_those_that_are_gone_are_told_plain_files_too_and_those_that_vanish_meanwhile_do_no_harm(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = home / "failed-batches"
    folder, file, busy = batches / "folder", batches / "file", batches / "busy"
    for each in (folder, busy):
        each.mkdir(parents=True)
    file.touch()
    for each in (folder, file, busy):
        age(each, 40)
    (batches / "gone").symlink_to("nowhere")  # as one that is listed and then deleted by another
    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path, **how: path == busy or rmtree(path, **how))
    assert set(remove_old_batches(settings())) == {folder, file}
    assert {each.name for each in batches.iterdir()} == {"busy", "gone"}


def test_whatever_is_wrong_with_the_stacks_own_store_is_told_and_the_rest_is_done(home: Path) -> None:
    home.mkdir()
    (home / "stack.json").write_text("no state")
    (home / "failed-batches" / "old").mkdir(parents=True)
    age(home / "failed-batches" / "old", 40)
    said: list[str] = []
    tidy(settings().model_copy(update={"retention": "policy=5"}), said.append)
    assert [line.partition(" ")[0] for line in said] == ["deleted", "SeaweedFS's", "the"]
    assert "stack.json is damaged" in said[1]

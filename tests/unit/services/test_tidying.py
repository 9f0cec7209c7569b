"""Logs that begin anew beneath their writers, and a home that is tidied once a day."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.services import processes, tidying
from infra.settings import Settings, settings

WRITER = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    (tmp_path / "logs").mkdir()
    return tmp_path


def test_a_log_begins_anew_while_a_service_goes_on_writing_to_it(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with (
        log.open("ab") as output,
        subprocess.Popen([sys.executable, "-c", WRITER], stdin=-1, stdout=output, text=True) as writer,
    ):
        assert writer.stdin
        writer.stdin.write("".join(f"line {number}\n" for number in range(1000)))
        writer.stdin.flush()
        deadline = time.monotonic() + 60
        while "line 999\n" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not processes.begin_log_anew(log, limit_bytes=100_000)
        assert processes.begin_log_anew(log, limit_bytes=1000)
        kept = (tmp_path / "server.log.1").read_text()
        assert kept.startswith("line ")
        assert kept.endswith("line 999\n")
        assert len(kept) <= 1000
        writer.stdin.write("another\n")
        writer.stdin.close()
        writer.wait(60)
    assert log.read_text() == "another\n", "no hole of what was there before"


def test_two_who_let_logs_begin_anew_at_once_do_not_fail_and_the_end_is_kept(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_LOG_LIMIT_MB", "0.1")
    log, known = home / "logs" / "server.log", settings()
    barrier = threading.Barrier(2)

    def shorten() -> list[Path]:
        barrier.wait(60)
        return tidying.shorten_logs(known)

    with ThreadPoolExecutor(2) as pool:
        for number in range(200):
            log.write_text(f"line {number}\n" * 20_000)
            did = [each.result(60) for each in [pool.submit(shorten), pool.submit(shorten)]]
            assert sorted(did) == [[], [log]]
            kept = (home / "logs" / "server.log.1").read_text()
            assert kept.endswith(f"\nline {number}\n")
            assert (len(kept) > 99_000, log.stat().st_size) == (True, 0)


def test_a_log_that_cannot_begin_anew_is_told_and_the_others_do(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RLHF_LOG_LIMIT_MB", "0.1")
    (home / "logs" / "a.log").symlink_to("gone")
    (home / "logs" / ".b.log.1").mkdir()  # in the way of its end
    for name in ("b", "c"):
        (home / "logs" / f"{name}.log").write_text("a line\n" * 20_000)
    assert tidying.shorten_logs(settings()) == [home / "logs" / "c.log"]
    [message] = caplog.messages
    assert "b.log is long, but cannot begin anew: [Errno 21] Is a directory" in message


def test_a_service_that_starts_while_its_log_begins_anew_keeps_what_it_writes(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = home / "logs" / "server.log"
    log.write_text("of the former\n" * 1000)

    def start(*_: object) -> None:
        log.replace(log.with_name("server.log.1"))
        log.write_text("of the new one\n")

    monkeypatch.setattr(processes.shutil, "copyfileobj", start)
    processes.begin_log_anew(log, limit_bytes=1000)
    assert log.read_text() == "of the new one\n"


def test_logs_begin_anew_while_the_command_tidy_is_at_work(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_LOG_LIMIT_MB", "0.1")
    monkeypatch.setattr(tidying, "LOOK_S", 0.01)
    log, program = home / "logs" / "server.log", home / "bin" / "rlhf"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nwhile [ -s {log} ]; do sleep 0.01; done\n")
    program.chmod(0o755)
    monkeypatch.setattr(tidying.sys, "executable", str(program.with_name("python")))
    monkeypatch.setattr(tidying, "LIMIT_S", 60.0)
    log.write_text("a line\n" * 20_000)
    tidying._tidy(settings())
    assert log.stat().st_size == 0
    assert (home / "logs" / "tidy.log").read_text() == ""


def test_a_new_home_is_not_tidied_and_one_of_yesterday_is_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Settings] = []
    monkeypatch.setattr(tidying, "_tidy", begun.append)
    tidying.look(settings())
    assert begun == []
    yesterday = time.time() - tidying.EVERY_S - 1
    os.utime(home / tidying.STAMP, (yesterday, yesterday))
    tidying.look(settings())
    tidying.look(settings())
    assert begun == [settings()]


@pytest.mark.integration
def test_what_keeps_the_home_tidy_goes_on_after_what_nobody_foresaw(monkeypatch: pytest.MonkeyPatch) -> None:
    happens = iter([KeyError("a variable that was removed while the environment was read"), SystemExit()])

    def read() -> Settings:
        raise next(happens)

    monkeypatch.setattr(tidying, "settings", read)
    monkeypatch.setattr(tidying, "LOOK_S", 0.0)
    with pytest.raises(SystemExit):
        tidying._keep_tidy()


def test_a_worker_that_only_has_containers_started_makes_no_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "none"))
    tidying.look(settings())
    assert not (tmp_path / "none").exists()


def test_the_worker_has_the_command_tidy_and_ends_it_when_it_takes_too_long(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RLHF_STORE_URL", (home / "objects").as_uri())
    monkeypatch.setenv("RLHF_RETENTION", "policy=5")
    log = home / "logs" / "tidy.log"
    tidying._tidy(settings())
    assert "the store gave back 0.0 MB" in log.read_text()
    assert caplog.messages == []
    monkeypatch.setattr(tidying, "LIMIT_S", 0.01)
    tidying._tidy(settings())
    assert caplog.messages == ["`rlhf tidy` did not end within 0 s and was killed; it goes on in a day"]

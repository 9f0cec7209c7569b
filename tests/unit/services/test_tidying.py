"""Logs that begin anew beneath their writers, and a home that is tidied once a day."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra.services import processes, tidying
from infra.settings import settings

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


def test_a_new_home_is_not_tidied_and_one_of_yesterday_is_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Path] = []
    monkeypatch.setattr(tidying, "_tidy", begun.append)
    tidying.look(settings())
    assert begun == []
    yesterday = time.time() - tidying.EVERY_S - 1
    os.utime(home / tidying.STAMP, (yesterday, yesterday))
    tidying.look(settings())
    tidying.look(settings())
    assert begun == [home / "logs" / "tidy.log"]


@pytest.mark.integration
def test_the_worker_has_the_command_tidy_and_ends_it_when_it_takes_too_long(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RLHF_STORE_URL", (home / "objects").as_uri())
    monkeypatch.setenv("RLHF_RETENTION", "policy=5")
    log = home / "logs" / "tidy.log"
    tidying._tidy(log)
    assert "the store gave back 0.0 MB" in log.read_text()
    assert caplog.messages == []
    monkeypatch.setattr(tidying, "LIMIT_S", 0.01)
    tidying._tidy(log)
    assert caplog.messages == ["`rlhf tidy` did not end within 0 s and was killed; it goes on in a day"]

"""Supervision: when a service is tried again, and what is left alone; and the unit of systemd that supervises."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infra.errors import ServiceError
from infra.process_record import ProcessRecord
from infra.services.bring_up import bring_back
from infra.services.state import StackState, is_locked, locked
from infra.services.supervise import Backoff, _Care
from infra.services.systemd import write_unit
from infra.settings import Settings


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RLHF_ENV_FILE", str(tmp_path / ".env"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_a_service_is_tried_at_once_then_later_and_later_and_at_once_again_when_it_has_worked() -> None:
    backoff, now, waits = Backoff(), 1000.0, []
    assert backoff.wait_s(now) == 0
    for _ in range(2000):  # a week: no number grows without bound
        backoff.tried(now)
        waits.append(backoff.wait_s(now))
        now += waits[-1]
        backoff.works(now)
    assert waits[:7] == [10, 20, 40, 80, 160, 300, 300]
    assert waits[-1] == 300
    backoff.works(now + 121)
    backoff.tried(now + 122)
    assert backoff.wait_s(now + 122) == 10


def test_only_what_is_due_is_started_again_and_what_waits_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    started = tmp_path / "started"
    care = _Care(told.append, ["sh", "-c", f"echo >> {started}; exit 1"])
    names = {"server", "store"}
    care.see_to(names, {"server": "has died"})
    for _ in range(3):
        care.see_to(names, {"server": "has died"})
    care.see_to(names, {"server": "has died", "store": "does not answer"})
    assert told == [
        "the server has died: bringing it back",
        "the server has died again, soon after the last try: the next is in 10 s",
        "the store does not answer: bringing it back",
    ]
    assert started.read_text() == "\n\n"


def test_nothing_is_started_for_a_supervisor_that_down_has_ended(home: Path) -> None:
    state = StackState()
    state.save(home)
    told: list[str] = []
    bring_back(Settings(home=home), told.append, supervisor=ProcessRecord.of(os.getpid()))
    assert told == []
    assert StackState.load(home) == state


def test_a_stack_is_seen_to_be_changed_by_another_command(home: Path) -> None:
    assert not is_locked(home)
    with locked(home, print):
        assert is_locked(home)
    assert not is_locked(home)


def test_the_unit_runs_the_command_with_the_stacks_variables_whatever_characters_they_have(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = home / """a "b" \\c 100% $HOME 'd'"""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("RLHF_CACHE_LIMIT_GB", "3")
    told: list[str] = []
    path = write_unit(Settings(home=odd), told.append, [sys.executable, "a $b %c"])
    assert path == tmp_path / "config/systemd/user/rlhf.service"
    lines = path.read_text().splitlines()
    escaped = str(odd).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    assert f'Environment="RLHF_HOME={escaped}"' in lines
    assert 'Environment="PATH=/usr/bin:/bin"' in lines
    assert f'ExecStart="{sys.executable}" "a $$b %%c"' in lines
    assert [line for line in told if "RLHF_CACHE_LIMIT_GB" in line], "what only this shell knows is told"
    write_unit(Settings(home=odd), told.append, [sys.executable])


def test_the_unit_of_another_stack_stays(home: Path) -> None:
    path = write_unit(Settings(home=home), print, [sys.executable])
    before = path.read_text()
    with pytest.raises(ServiceError, match=r"rlhf\.service is there, but not for the stack in /elsewhere"):
        write_unit(Settings(home=Path("/elsewhere")), print, [sys.executable])
    assert path.read_text() == before


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    told: list[str] = []
    path = write_unit(Settings(home=home / "100% $x"), told.append, [sys.executable, "up"])
    assert not [line for line in told if "systemd-analyze" in line]
    wrong = path.read_text().replace("KillMode=process", "KillMode=whatever")
    path.write_text(wrong)
    command = ["systemd-analyze", "--user", "--man=no", "verify", str(path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr
    assert "whatever" in said, "it would have said so"

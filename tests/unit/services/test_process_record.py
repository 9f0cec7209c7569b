"""A process is known by its id, its boot and its start: never by the id alone, never by the wall clock."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from infra import process_record
from infra.process_record import ProcessRecord, describe, here, marked_processes
from infra.services.service import Service


def test_a_process_is_recognised_by_its_start_and_not_by_its_id_alone() -> None:
    me = ProcessRecord.of(os.getpid())
    assert me.process() == psutil.Process()
    assert ProcessRecord(pid=me.pid, started=me.started + 1).process() is None


def test_a_process_of_another_boot_is_another_process() -> None:
    me = ProcessRecord.of(os.getpid())
    assert me.model_copy(update={"boot": "an earlier one"}).process() is None


@pytest.mark.parametrize("boot", ["", "an id"])
def test_the_same_namespace_on_two_machines_is_two_places(monkeypatch: pytest.MonkeyPatch, boot: str) -> None:
    """The first namespace has one number on every machine, and not every system has an id of its boot."""
    monkeypatch.setattr(os, "readlink", lambda _: "pid:[4026531836]")
    places = set()
    for machine in ("one", "two"):
        monkeypatch.setattr(process_record, "_boot", lambda machine=machine: boot and f"{boot} of {machine}")
        monkeypatch.setattr(platform, "node", lambda machine=machine: machine)
        assert here() == here()
        places.add(here())
    assert len(places) == 2


def test_a_process_that_has_ended_is_gone_even_before_its_parent_looks() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    record = ProcessRecord.of(child.pid)
    assert record.process() is not None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie from here on
    assert record.process() is None
    child.communicate()
    assert record.process() is None


def test_a_service_is_recognised_after_the_clock_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel derives a start on the wall clock from the clock of now: setting that moves every start."""
    service = Service(
        name="sleeper",
        title="a sleeper",
        command=(sys.executable, "-c", "input()"),
        environment={},
        cwd=tmp_path,
        log=tmp_path / "log",
        address="",
        probe=lambda _: None,
        start_timeout_s=1,
        settle_timeout_s=1,
    )
    with subprocess.Popen(service.command, stdin=subprocess.PIPE) as child:
        record = service.record(psutil.Process(child.pid))
        create_time = psutil.Process.create_time
        monkeypatch.setattr(psutil.Process, "create_time", lambda self: create_time(self) + 3600)
        assert record.process() is not None
        assert record.pid == child.pid
        child.kill()
    assert record.process() is None


def test_processes_are_found_by_a_variable_of_their_environment() -> None:
    environment = {**os.environ, "TEST_MARK": f"mark-{os.getpid()}"}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment) as child:
        assert [each.pid for each in marked_processes("TEST_MARK", environment["TEST_MARK"])] == [child.pid]
        assert describe(psutil.Process(child.pid)).startswith(f"{child.pid} (")
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert marked_processes("TEST_MARK", environment["TEST_MARK"]) == []

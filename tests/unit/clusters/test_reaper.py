import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from infra.clusters import ClusterRecord, leftover_processes
from infra.clusters.reaper import end_cluster
from infra.clusters.record import MARK_VARIABLE
from infra.errors import ClusterError
from infra.process_record import ProcessRecord

Start = Callable[..., subprocess.Popen[str]]
SLEEP = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
SPAWNS_UNMARKED_CHILD = (
    "import subprocess, sys, time; "
    f"c = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], env={{}}, stdout=subprocess.PIPE, text=True); "
    "c.stdout.readline(); print(c.pid, flush=True); time.sleep(600)"
)


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program with a mark, wait until it says that it is up; end it after the test."""
    started: list[subprocess.Popen[str]] = []

    def run(program: str, mark: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, MARK_VARIABLE: mark},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def record(tmp_path: Path) -> ClusterRecord:
    record = ClusterRecord(
        name="night",
        mark=secrets.token_hex(8),
        owner=ProcessRecord.of(os.getpid()),
        temp_dir=tmp_path / "rf-1",
        log_dir=tmp_path / "logs" / "night-1",
    )
    (record.ray_dir / "session_1" / "logs").mkdir(parents=True)
    (record.ray_dir / "session_1" / "logs" / "worker.err").write_text("a trace")
    (record.ray_dir / "session_latest").symlink_to(record.ray_dir / "session_1")
    record.token.write_text("secret")
    record.log_dir.mkdir(parents=True)
    record.save(tmp_path / "night.json")
    return record


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_process_that_ignores_sigterm_ends_all_the_same(start: Start, record: ClusterRecord, tmp_path: Path) -> None:
    process = start(STUBBORN, record.mark)
    assert _line(process) == "up"
    end_cluster(tmp_path / "night.json", record)
    assert process.wait(timeout=10) == -9


def test_a_stopped_process_ends_all_the_same(start: Start, record: ClusterRecord, tmp_path: Path) -> None:
    process = start(SLEEP, record.mark)
    assert _line(process) == "up"
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # until it has stopped: of two signals that wait, the lower one comes first
    end_cluster(tmp_path / "night.json", record)
    assert process.wait(timeout=10) == -9


def test_a_descendant_that_dropped_the_mark_is_found(start: Start, record: ClusterRecord, tmp_path: Path) -> None:
    parent = start(SPAWNS_UNMARKED_CHILD, record.mark)
    child = psutil.Process(int(_line(parent)))
    assert {process.pid for process in leftover_processes(record.mark)} == {parent.pid, child.pid}
    end_cluster(tmp_path / "night.json", record)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_other_clusters_and_the_caller_are_left_alone(start: Start, record: ClusterRecord, tmp_path: Path) -> None:
    other = start(SLEEP, "another mark")
    assert _line(other) == "up"
    end_cluster(tmp_path / "night.json", record)
    assert other.poll() is None


def test_a_recorded_id_that_now_belongs_to_another_process_is_left_alone(
    start: Start, record: ClusterRecord, tmp_path: Path
) -> None:
    other = start(SLEEP, "another mark")
    assert _line(other) == "up"
    reused = ProcessRecord(pid=other.pid, started=ProcessRecord.of(other.pid).started - 1)
    end_cluster(tmp_path / "night.json", record.model_copy(update={"head": (reused, reused)}))
    assert other.poll() is None


def test_a_recorded_process_ends_even_without_its_mark(start: Start, record: ClusterRecord, tmp_path: Path) -> None:
    head = start(SLEEP, "its mark was overwritten")
    assert _line(head) == "up"
    recorded = ProcessRecord.of(head.pid)
    (tmp_path / "night.json").unlink()
    end_cluster(tmp_path / "night.json", record.model_copy(update={"head": (recorded, recorded)}))
    assert head.wait(timeout=10) == -15


def test_the_temp_dir_token_and_record_go_and_the_logs_stay(record: ClusterRecord, tmp_path: Path) -> None:
    end_cluster(tmp_path / "night.json", record)
    assert not record.temp_dir.exists()
    assert not (tmp_path / "night.json").exists()
    assert (record.log_dir / "ray" / "worker.err").read_text() == "a trace"
    end_cluster(tmp_path / "night.json", record)  # and once more: nothing to do is fine


def test_only_the_logs_of_the_newest_clusters_stay(record: ClusterRecord, tmp_path: Path) -> None:
    for age in range(1, 31):
        folder = tmp_path / "logs" / f"older-{age}"
        folder.mkdir()
        os.utime(folder, (1_000_000 - age, 1_000_000 - age))
    end_cluster(tmp_path / "night.json", record)
    kept = {entry.name for entry in (tmp_path / "logs").iterdir()}
    assert kept == {"night-1", *(f"older-{age}" for age in range(1, 20))}


def test_the_logs_of_a_cluster_that_runs_stay_however_old_they_are(record: ClusterRecord, tmp_path: Path) -> None:
    running = record.model_copy(update={"name": "days", "mark": "d", "log_dir": tmp_path / "logs" / "days-1"})
    running.save(tmp_path / "days.json")
    (tmp_path / "broken.json").write_text("{")
    for age, name in enumerate(["days-1", "ended-1", *(f"short-{number}" for number in range(25))]):
        folder = tmp_path / "logs" / name
        folder.mkdir()
        os.utime(folder, (1_000_000 + age, 1_000_000 + age))
    end_cluster(tmp_path / "night.json", record)
    assert running.log_dir.is_dir()
    assert not (tmp_path / "logs" / "ended-1").exists()


def test_the_record_of_a_younger_cluster_of_the_name_stays(record: ClusterRecord, tmp_path: Path) -> None:
    younger = record.model_copy(update={"mark": "younger", "temp_dir": tmp_path / "rf-2"})
    younger.save(tmp_path / "night.json")
    end_cluster(tmp_path / "night.json", record)
    assert ClusterRecord.load(tmp_path / "night.json") == younger


def test_a_folder_that_is_not_named_as_ours_is_never_deleted(record: ClusterRecord, tmp_path: Path) -> None:
    precious = tmp_path / "home"
    precious.mkdir()
    (tmp_path / "night.json").unlink()
    end_cluster(tmp_path / "night.json", record.model_copy(update={"temp_dir": precious}))
    assert precious.exists()


def test_what_cannot_be_ended_in_time_is_named_and_the_record_stays(
    start: Start, record: ClusterRecord, tmp_path: Path
) -> None:
    process = start(STUBBORN, record.mark)
    assert _line(process) == "up"
    with pytest.raises(ClusterError, match=rf"still has processes .*{process.pid}"):
        end_cluster(tmp_path / "night.json", record, timeout_s=0.3)  # SIGKILL comes after two seconds
    assert (tmp_path / "night.json").exists()
    assert record.temp_dir.exists()

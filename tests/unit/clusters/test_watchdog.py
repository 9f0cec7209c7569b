import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from infra.clusters.record import ClusterRecord
from infra.clusters.watchdog import CLEAN, start_watchdog, wait_for_words, watch
from infra.errors import ClusterError
from infra.process_record import ProcessRecord

ME = ProcessRecord.of(os.getpid())

pytestmark = pytest.mark.integration


@pytest.fixture
def ended() -> ProcessRecord:
    """A process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    record = ProcessRecord.of(process.pid)
    process.communicate()
    return record


def _open_descriptors() -> set[str]:
    """Return the numbers of this process's descriptors; what the tests print to a file moves its place, no more."""
    return set(os.listdir(f"/proc/{os.getpid()}/fd"))


def _written(tmp_path: Path) -> tuple[Path, ClusterRecord]:
    record = ClusterRecord(
        name="night", mark="none has it", owner=ME, temp_dir=tmp_path / "rf-1", log_dir=tmp_path / "logs" / "n"
    )
    record.temp_dir.mkdir()
    record.log_dir.mkdir(parents=True)
    record.save(tmp_path / "night.json")
    return tmp_path / "night.json", record


def test_a_closed_pipe_ends_the_watch_whatever_was_written_before(tmp_path: Path) -> None:
    heard, heartbeats = os.pipe()
    os.write(heartbeats, b"...")
    os.close(heartbeats)
    assert watch(heard, *_written(tmp_path), stalled_after_s=60) == "its owner is gone or gave it back"
    os.close(heard)


def test_silence_ends_the_watch_after_all_heartbeats_were_read(tmp_path: Path) -> None:
    heard, heartbeats = os.pipe()
    os.write(heartbeats, b"." * 100)
    assert watch(heard, *_written(tmp_path), stalled_after_s=0.1) == "its owner has been silent for 0.1 s"
    os.set_blocking(heard, False)
    with pytest.raises(BlockingIOError):
        os.read(heard, 1)
    os.close(heard)
    os.close(heartbeats)


def test_an_owner_that_is_gone_ends_the_watch_though_another_holds_the_pipe(
    tmp_path: Path, ended: ProcessRecord
) -> None:
    path, record = _written(tmp_path)
    heard, heartbeats = os.pipe()
    reason = watch(heard, path, record.model_copy(update={"owner": ended}), stalled_after_s=60)
    assert reason == "its owner is gone"
    os.close(heard)
    os.close(heartbeats)


def test_a_head_that_was_recorded_later_and_is_gone_ends_the_watch(tmp_path: Path, ended: ProcessRecord) -> None:
    path, record = _written(tmp_path)
    record.model_copy(update={"head": (ME, ended)}).save(path)
    heard, heartbeats = os.pipe()
    assert watch(heard, path, record, stalled_after_s=60) == "it lost one of Ray's own processes"
    os.close(heard)
    os.close(heartbeats)


def test_the_watchdog_is_nobodys_child_and_imports_neither_ray_nor_torch(tmp_path: Path) -> None:
    path, record = _written(tmp_path)
    watch = start_watchdog(path, record, stalled_after_s=60)
    process = psutil.Process(watch.process.pid)
    assert process not in psutil.Process().children(recursive=True)
    assert os.getsid(process.pid) != os.getsid(0)
    loaded = Path(f"/proc/{process.pid}/maps")
    if loaded.exists():
        assert not [line for line in loaded.read_text().splitlines() if "_raylet" in line or "libtorch" in line]
    os.close(watch.heartbeats)
    assert wait_for_words(watch.reports, timeout_s=20) == CLEAN
    os.close(watch.reports)


def test_a_watchdog_starts_though_its_log_folder_was_tidied_away(tmp_path: Path) -> None:
    path, record = _written(tmp_path)
    record.log_dir.rmdir()
    watch = start_watchdog(path, record, stalled_after_s=60)
    os.close(watch.heartbeats)
    assert wait_for_words(watch.reports, timeout_s=20) == CLEAN
    os.close(watch.reports)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_watchdog_outlives_what_is_meant_for_its_owner(tmp_path: Path, number: signal.Signals) -> None:
    path, record = _written(tmp_path)
    watch = start_watchdog(path, record, stalled_after_s=60)
    os.kill(watch.process.pid, number)
    os.close(watch.heartbeats)
    assert wait_for_words(watch.reports, timeout_s=20) == CLEAN
    assert not path.exists()
    assert not record.temp_dir.exists()
    os.close(watch.reports)


def test_a_watchdog_that_cannot_start_is_named_with_its_log(tmp_path: Path) -> None:
    path, record = _written(tmp_path)
    path.unlink()  # it finds no record
    before = _open_descriptors()
    with pytest.raises(ClusterError, match=r"watchdog of cluster 'night' did not start .*watchdog\.log"):
        start_watchdog(path, record, stalled_after_s=60)
    assert _open_descriptors() == before
    assert "FileNotFoundError" in (record.log_dir / "watchdog.log").read_text()

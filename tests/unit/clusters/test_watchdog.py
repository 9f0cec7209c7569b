import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from infra.clusters.manifest import ClusterManifest, ProcessRecord
from infra.clusters.watchdog import CLEAN, start_watchdog, wait_for_words, watch
from infra.errors import ClusterError

ME = ProcessRecord.of(os.getpid())


def _written(tmp_path: Path) -> tuple[Path, ClusterManifest]:
    manifest = ClusterManifest(
        name="night", mark="none has it", owner=ME, temp_dir=tmp_path / "rf-1", log_dir=tmp_path / "logs" / "n"
    )
    manifest.temp_dir.mkdir()
    manifest.log_dir.mkdir(parents=True)
    manifest.save(tmp_path / "night.json")
    return tmp_path / "night.json", manifest


def test_a_closed_pipe_ends_the_watch_whatever_was_written_before() -> None:
    heard, heartbeats = os.pipe()
    os.write(heartbeats, b"...")
    os.close(heartbeats)
    assert watch(heard, ME, stalled_after_s=60) == "its owner is gone or gave it back"
    os.close(heard)


def test_silence_ends_the_watch_and_heartbeats_do_not() -> None:
    heard, heartbeats = os.pipe()
    os.write(heartbeats, b"." * 100)
    assert watch(heard, ME, stalled_after_s=0.1) == "its owner has been silent for 0.1 s"
    assert os.get_blocking(heard)
    os.set_blocking(heard, False)
    with pytest.raises(BlockingIOError):  # it had read them all before it judged
        os.read(heard, 1)
    os.close(heard)
    os.close(heartbeats)


def test_an_owner_that_is_gone_ends_the_watch_though_another_holds_the_pipe() -> None:
    heard, heartbeats = os.pipe()
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    record = ProcessRecord.of(owner.pid)
    threading.Timer(0.2, owner.kill).start()
    assert watch(heard, record, stalled_after_s=60) == "its owner is gone"
    owner.communicate()
    os.close(heard)
    os.close(heartbeats)


def test_the_watchdog_is_nobodys_child_and_imports_neither_ray_nor_torch(tmp_path: Path) -> None:
    path, manifest = _written(tmp_path)
    watch = start_watchdog(path, manifest, stalled_after_s=60)
    process = psutil.Process(watch.process.pid)
    assert process not in psutil.Process().children(recursive=True)
    assert os.getsid(process.pid) != os.getsid(0)
    loaded = Path(f"/proc/{process.pid}/maps")
    if loaded.exists():
        assert not [line for line in loaded.read_text().splitlines() if "_raylet" in line or "libtorch" in line]
    os.close(watch.heartbeats)
    assert wait_for_words(watch.reports, timeout_s=20) == CLEAN
    os.close(watch.reports)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_watchdog_outlives_what_is_meant_for_its_owner(tmp_path: Path, number: signal.Signals) -> None:
    path, manifest = _written(tmp_path)
    watch = start_watchdog(path, manifest, stalled_after_s=60)
    os.kill(watch.process.pid, number)
    os.close(watch.heartbeats)
    assert wait_for_words(watch.reports, timeout_s=20) == CLEAN
    assert not path.exists()
    assert not manifest.temp_dir.exists()
    os.close(watch.reports)


def test_a_watchdog_that_cannot_start_is_named_with_its_log(tmp_path: Path) -> None:
    path, manifest = _written(tmp_path)
    path.unlink()  # it finds no manifest
    before = set(psutil.Process().open_files()), psutil.Process().num_fds()
    with pytest.raises(ClusterError, match=r"watchdog of cluster 'night' did not start .*watchdog\.log"):
        start_watchdog(path, manifest, stalled_after_s=60)
    assert (set(psutil.Process().open_files()), psutil.Process().num_fds()) == before
    assert "FileNotFoundError" in (manifest.log_dir / "watchdog.log").read_text()

"""Whatever ends the owner of a cluster ends the cluster, within 30 seconds: real clusters, real signals."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from infra.clusters import ClusterRecord, leftover_processes, reap_orphans
from infra.process_record import ProcessRecord
from tests.integration.cluster_processes import (
    GONE_WITHIN_S,
    OWNER,
    Owners,
    go_on,
    run,
    says,
    wait_until_nothing_is_left,
)

pytestmark = pytest.mark.integration


@pytest.fixture
def owners(tmp_path: Path) -> Iterator[Owners]:
    owners = Owners(tmp_path)
    yield owners
    owners.end()


def _kill(process: subprocess.Popen[str], _: ClusterRecord) -> None:
    process.kill()


def _terminate(process: subprocess.Popen[str], _: ClusterRecord) -> None:
    process.terminate()


def _kill_group_and_descendants(process: subprocess.Popen[str], _: ClusterRecord) -> None:
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    os.killpg(process.pid, signal.SIGKILL)


def _stop(process: subprocess.Popen[str], _: ClusterRecord) -> None:
    process.send_signal(signal.SIGSTOP)


def _let_it_go_on(process: subprocess.Popen[str], _: ClusterRecord) -> None:
    go_on(process)


@pytest.mark.parametrize(
    ("then", "how"),
    [
        pytest.param("waits", _kill, marks=pytest.mark.clusters),
        pytest.param("waits", _terminate, marks=pytest.mark.clusters),
        ("waits", _kill_group_and_descendants),
        ("forks", _kill),
        pytest.param("raises", _let_it_go_on, marks=pytest.mark.clusters),
        ("returns", _let_it_go_on),
    ],
)
def test_a_cluster_ends_with_its_owner_however_that_ends(
    owners: Owners,
    then: str,
    how: Callable[[subprocess.Popen[str], ClusterRecord], None],
) -> None:
    owner, record = owners.start(then)
    assert record.is_running
    assert record.temp_dir.stat().st_mode & 0o777 == 0o700
    assert record.token.stat().st_mode & 0o777 == 0o600
    how(owner, record)
    wait_until_nothing_is_left(record)
    assert not list(owners.directory.glob("*.json"))
    assert (record.log_dir / "ray" / "gcs_server.out").exists()


@pytest.mark.clusters
@pytest.mark.parametrize("whole_group", [False, True])
def test_a_stopped_owner_loses_its_cluster_after_the_time_it_was_given(owners: Owners, *, whole_group: bool) -> None:
    owner, record = owners.start(stalled_after_s=2)
    signalled = partial(os.killpg if whole_group else os.kill, owner.pid)
    watchdog = psutil.Process(record.watchdog_pid)
    assert os.getpgid(watchdog.pid) != os.getpgid(owner.pid)
    signalled(signal.SIGSTOP)
    assert watchdog.status() != psutil.STATUS_STOPPED
    wait_until_nothing_is_left(record)
    assert "silent for 2 s" in (record.log_dir / "watchdog.log").read_text()
    signalled(signal.SIGCONT)  # and it lives on to tell the tale
    go_on(owner)
    assert owner.wait(timeout=30) == 0


@pytest.mark.clusters
@pytest.mark.parametrize("watchdog", ["killed", "slow"])
def test_whoever_takes_a_dead_owners_name_ends_the_cluster_that_it_left(owners: Owners, watchdog: str) -> None:
    first, left = owners.start()
    os.kill(left.watchdog_pid, signal.SIGKILL if watchdog == "killed" else signal.SIGSTOP)
    first.kill()
    first.communicate()
    assert left.is_running  # nobody ended it
    _, record = owners.start()
    assert record.mark != left.mark
    assert not leftover_processes(left.mark, left.head)
    assert not left.temp_dir.exists()
    if watchdog == "slow":  # it comes late, and finds another's cluster under the name
        os.kill(left.watchdog_pid, signal.SIGCONT)
        assert left.watchdog is not None
        _wait_for_end(left.watchdog)
    assert record.is_running
    assert ClusterRecord.load(owners.directory / "night.json").mark == record.mark


def _wait_for_end(recorded: ProcessRecord) -> None:
    deadline = time.monotonic() + GONE_WITHIN_S
    while recorded.process() is not None:
        assert time.monotonic() < deadline, f"process {recorded.pid} did not end within {GONE_WITHIN_S:g} s"
        time.sleep(0.1)


@pytest.mark.clusters
def test_an_owner_killed_while_its_cluster_starts_leaves_nothing(owners: Owners) -> None:
    owner = run(OWNER, str(owners.directory), "waits", "120")
    deadline = time.monotonic() + 60
    record = None
    while record is None or not leftover_processes(record.mark):
        assert time.monotonic() < deadline, "`ray start` was not seen within 60 s"
        path = owners.directory / "night.json"
        record = ClusterRecord.load(path) if path.exists() else None
    assert not record.head
    owner.kill()
    owner.communicate()
    wait_until_nothing_is_left(record)


@pytest.mark.clusters
def test_without_its_watchdog_the_owner_cleans_up_alone(owners: Owners) -> None:
    owner, record = owners.start("releases")
    os.kill(record.watchdog_pid, signal.SIGKILL)
    go_on(owner)
    assert says(owner) == "released"
    assert not leftover_processes(record.mark, record.head)
    assert not record.temp_dir.exists()


@pytest.mark.clusters
def test_without_owner_and_watchdog_the_orphan_is_reaped_by_whoever_looks(owners: Owners) -> None:
    owner, record = owners.start()
    assert reap_orphans(owners.directory) == []
    os.kill(record.watchdog_pid, signal.SIGKILL)
    owner.kill()
    owner.communicate()
    assert record.is_running
    assert reap_orphans(owners.directory) == ["night"]
    assert not leftover_processes(record.mark, record.head)
    assert not record.temp_dir.exists()

"""Real clusters, real signals: whatever ends the owner ends its cluster, and nothing else does."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray

from infra.clusters import (
    ClusterManifest,
    connect,
    disconnect,
    lease_cluster,
    leftover_processes,
    reap_orphans,
    release_cluster,
)
from infra.errors import ClusterError

pytestmark = pytest.mark.integration
GONE_WITHIN_S = 30.0

OWNER = """
import os, sys, time
from pathlib import Path
from infra.clusters import lease_cluster, release_cluster
directory, then, stalled_after_s = sys.argv[1:]
lease_cluster(
    "night", directory=Path(directory), num_cpus=1, object_store_mb=80, stalled_after_s=float(stalled_after_s)
)
if then == "forks" and os.fork() == 0:
    time.sleep(600)  # a child that outlives its parent, and has no business with the lease
    sys.exit()
print("leased", flush=True)
input()
if then == "raises":
    raise RuntimeError("as it may happen")
if then == "releases":
    release_cluster("night")
    print("released", flush=True)
    input()
"""

DRIVER = """
import os, sys
from pathlib import Path
from infra.clusters import ClusterManifest, connect
import ray
connect(ClusterManifest.load(Path(sys.argv[1])))
@ray.remote
class Counter:
    def __init__(self): self.count = 0
    def add(self): self.count += 1; return self.count, os.getpid(), os.environ.get("STORE_SECRET")
counter = Counter.options(name="counter", lifetime="detached", num_cpus=1).remote()
print(*ray.get(counter.add.remote(), timeout=30), flush=True)
input()
"""


def _run(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


class Owners:
    """Starts processes that lease a cluster each, and leaves nothing of them behind."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.started: list[tuple[subprocess.Popen[str], ClusterManifest]] = []
        self.children: list[psutil.Process] = []

    def start(self, then: str = "waits", stalled_after_s: float = 120) -> tuple[subprocess.Popen[str], ClusterManifest]:
        process = _run(OWNER, str(self.directory), then, str(stalled_after_s))
        assert _says(process) == "leased"
        self.children += psutil.Process(process.pid).children()
        self.started.append((process, ClusterManifest.load(self.directory / "night.json")))
        return self.started[-1]

    def end(self) -> None:
        for child in self.children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        for process, manifest in self.started:
            process.kill()
            process.communicate()
            _wait_until_nothing_is_left(manifest)


@pytest.fixture
def owners(tmp_path: Path) -> Iterator[Owners]:
    owners = Owners(tmp_path)
    yield owners
    owners.end()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clusters")


def _lease(directory: Path) -> ClusterManifest:
    return lease_cluster(
        "shared", directory=directory, num_cpus=2, object_store_mb=80, environment={"STORE_SECRET": "xyz"}
    )


@pytest.fixture(scope="module")
def shared(directory: Path) -> Iterator[ClusterManifest]:
    """One cluster, held by the tests' own process, for all that does not end it."""
    manifest = _lease(directory)
    yield manifest
    release_cluster("shared")
    _wait_until_nothing_is_left(manifest)


@pytest.fixture
def connected(shared: ClusterManifest) -> Iterator[ClusterManifest]:
    connect(shared)
    yield shared
    disconnect()


def _wait_until_nothing_is_left(manifest: ClusterManifest) -> None:
    deadline = time.monotonic() + GONE_WITHIN_S
    while time.monotonic() < deadline:
        left = leftover_processes(manifest.mark, manifest.head)
        if not left and not manifest.temp_dir.exists():
            return
        time.sleep(0.1)
    pytest.fail(f"after {GONE_WITHIN_S:g} s cluster {manifest.name!r} has {left}, {manifest.temp_dir}")


def _kill(process: subprocess.Popen[str], _: ClusterManifest) -> None:
    process.kill()


def _terminate(process: subprocess.Popen[str], _: ClusterManifest) -> None:
    process.terminate()


def _kill_group_and_descendants(process: subprocess.Popen[str], _: ClusterManifest) -> None:
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    os.killpg(process.pid, signal.SIGKILL)


def _stop(process: subprocess.Popen[str], _: ClusterManifest) -> None:
    process.send_signal(signal.SIGSTOP)


def _let_it_go_on(process: subprocess.Popen[str], _: ClusterManifest) -> None:
    _go_on(process)


@pytest.mark.parametrize(
    ("then", "how"),
    [
        ("waits", _kill),
        ("waits", _terminate),
        ("waits", _kill_group_and_descendants),
        ("forks", _kill),
        ("raises", _let_it_go_on),
        ("returns", _let_it_go_on),
    ],
)
def test_a_cluster_ends_with_its_owner_however_that_ends(
    owners: Owners,
    then: str,
    how: Callable[[subprocess.Popen[str], ClusterManifest], None],
) -> None:
    owner, manifest = owners.start(then)
    assert manifest.is_running
    assert manifest.temp_dir.stat().st_mode & 0o777 == 0o700
    assert manifest.token.stat().st_mode & 0o777 == 0o600
    how(owner, manifest)
    _wait_until_nothing_is_left(manifest)
    assert not list(owners.directory.glob("*.json"))
    assert (manifest.log_dir / "ray" / "gcs_server.out").exists()


def test_a_stopped_owner_loses_its_cluster_after_the_time_it_was_given(owners: Owners) -> None:
    owner, manifest = owners.start(stalled_after_s=2)
    owner.send_signal(signal.SIGSTOP)
    _wait_until_nothing_is_left(manifest)
    assert "silent for 2 s" in (manifest.log_dir / "watchdog.log").read_text()
    owner.send_signal(signal.SIGCONT)  # and it lives on to tell the tale
    _go_on(owner)
    assert owner.wait(timeout=30) == 0


def test_an_owner_killed_while_its_cluster_starts_leaves_nothing(owners: Owners) -> None:
    owner = _run(OWNER, str(owners.directory), "waits", "120")
    deadline = time.monotonic() + 60
    manifest = None
    while manifest is None or not leftover_processes(manifest.mark):
        assert time.monotonic() < deadline, "`ray start` was not seen within 60 s"
        path = owners.directory / "night.json"
        manifest = ClusterManifest.load(path) if path.exists() else None
    assert not manifest.head
    owner.kill()
    owner.communicate()
    _wait_until_nothing_is_left(manifest)


def test_without_its_watchdog_the_owner_cleans_up_alone(owners: Owners) -> None:
    owner, manifest = owners.start("releases")
    os.kill(manifest.watchdog_pid, signal.SIGKILL)
    _go_on(owner)
    assert _says(owner) == "released"
    assert not leftover_processes(manifest.mark, manifest.head)
    assert not manifest.temp_dir.exists()


def test_without_owner_and_watchdog_the_orphan_is_reaped_by_whoever_looks(owners: Owners) -> None:
    owner, manifest = owners.start()
    assert reap_orphans(owners.directory) == []
    os.kill(manifest.watchdog_pid, signal.SIGKILL)
    owner.kill()
    owner.communicate()
    assert manifest.is_running
    assert reap_orphans(owners.directory) == ["night"]
    assert not leftover_processes(manifest.mark, manifest.head)
    assert not manifest.temp_dir.exists()


def test_a_detached_actor_outlives_a_killed_driver_that_does_not_hold_the_lease(
    connected: ClusterManifest, directory: Path
) -> None:
    driver = _run(DRIVER, str(directory / "shared.json"))
    count, pid, secret = _says(driver).split()
    assert (count, secret) == ("1", "xyz")
    driver.kill()
    driver.communicate()
    counter = ray.get_actor("counter", namespace=connected.namespace)
    assert ray.get(counter.add.remote(), timeout=30) == (2, int(pid), "xyz")
    assert int(pid) in {process.pid for process in leftover_processes(connected.mark)}
    ray.kill(counter)


def test_a_second_lease_of_the_name_is_the_warm_cluster(shared: ClusterManifest, directory: Path) -> None:
    assert _lease(directory) == shared


def test_a_killed_watchdog_is_replaced_when_the_cluster_is_leased_again(
    shared: ClusterManifest, directory: Path
) -> None:
    os.kill(_lease(directory).watchdog_pid, signal.SIGKILL)
    again = _lease(directory)
    assert again.head == shared.head
    assert again.watchdog is not None
    assert again.watchdog.process() is not None


def test_connecting_keeps_the_signal_handlers_and_the_environment(shared: ClusterManifest) -> None:
    def on_sigterm(*_: object) -> None: ...

    def on_sigint(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, on_sigterm), signal.signal(signal.SIGINT, on_sigint)
    variables = dict(os.environ)
    try:
        for _ in range(2):  # and once more: connected already is fine
            connect(shared)
            assert signal.getsignal(signal.SIGTERM) is on_sigterm
            assert signal.getsignal(signal.SIGINT) is on_sigint
        assert {key for key in os.environ if key.startswith("RAY_AUTH")} == {
            key for key in variables if key.startswith("RAY_AUTH")
        }
        assert ray.cluster_resources()["CPU"] == 2
        disconnect()
        assert signal.getsignal(signal.SIGTERM) is on_sigterm
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


def test_a_thread_can_connect_as_tasks_do(shared: ClusterManifest) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            connect(shared)
            assert ray.cluster_resources()["CPU"] == 2
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert not failures
    disconnect()


def test_two_clusters_at_once_do_not_meet(owners: Owners, connected: ClusterManifest) -> None:
    owner, other = owners.start()
    assert other.address != connected.address
    assert ray.cluster_resources()["CPU"] == 2
    with pytest.raises(ClusterError, match=r"connected to the cluster at .* call disconnect\(\) first"):
        connect(other)
    disconnect()
    connect(other)  # with another token, from the same process
    assert ray.cluster_resources()["CPU"] == 1
    disconnect()
    with pytest.raises(ClusterError, match=f"'night' is held by process {owner.pid}"):
        lease_cluster("night", directory=owners.directory, num_cpus=1)
    owner.kill()
    _wait_until_nothing_is_left(other)
    assert connected.is_running
    connect(connected)
    assert ray.cluster_resources()["CPU"] == 2
    with pytest.raises(ClusterError, match=r"'night' at .* is gone: its processes have ended; see"):
        connect(other)


def test_a_wrong_token_is_told_in_one_sentence(shared: ClusterManifest, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("wrong")
    with pytest.raises(ClusterError, match=r"'shared' at .* does not answer: .*[Aa]uth.*; see") as caught:
        connect(shared.model_copy(update={"temp_dir": tmp_path}))
    assert "\n" not in str(caught.value)
    connect(shared)  # the right one is not forgotten for it
    disconnect()


def test_an_absent_token_or_address_is_told_at_once(shared: ClusterManifest, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=f"token file {tmp_path}/token is not there"):
        connect(shared.model_copy(update={"temp_dir": tmp_path}))
    with pytest.raises(ClusterError, match="'shared' has not finished starting"):
        connect(shared.model_copy(update={"address": ""}))


def test_a_control_server_that_hangs_is_told_by_the_deadline(shared: ClusterManifest) -> None:
    head = psutil.Process(shared.head_pid)
    head.suspend()
    try:
        with pytest.raises(ClusterError, match=r"'shared' at .* did not answer within 1 s"):
            connect(shared, timeout_s=1)
    finally:
        head.resume()
    connect(shared)
    disconnect()


def test_a_cluster_that_lost_its_head_is_started_anew_under_the_driver(tmp_path: Path) -> None:
    def lease() -> ClusterManifest:
        return lease_cluster("phoenix", directory=tmp_path, num_cpus=1, object_store_mb=80)

    first = lease()
    connect(first)
    psutil.Process(first.head_pid).kill()
    with pytest.raises(ClusterError, match="is gone: its processes have ended"):
        connect(first)
    second = lease()
    try:
        _wait_until_nothing_is_left(first)
        assert second.mark != first.mark
        connect(second)
        assert ray.cluster_resources()["CPU"] == 1
    finally:
        release_cluster("phoenix")
    assert not leftover_processes(second.mark, second.head)
    assert not ray.is_initialized()
    release_cluster("phoenix")  # and once more: not held is fine


def test_a_start_that_takes_too_long_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"'slow' did not start within 0\.2 s; raise start_timeout_s"):
        lease_cluster("slow", directory=tmp_path, num_cpus=1, object_store_mb=80, start_timeout_s=0.2)
    assert not list(tmp_path.glob("*.json"))
    assert not [entry for entry in tmp_path.rglob("*") if entry.name.startswith("rf-")]

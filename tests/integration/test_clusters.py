"""Clusters as their users meet them: warm, apart from each other, and clear about what is wrong."""

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from infra.certificate import own_certificate
from infra.clusters import (
    ClusterRecord,
    connect,
    disconnect,
    lease_cluster,
    leftover_processes,
    release_cluster,
)
from infra.clusters.ray_head import SILENT_NODE
from infra.errors import ClusterError, ClusterNotReadyError
from tasks.clusters import IMPORTED
from tasks.ppo_group import ANSWER_S
from tests.integration.cluster_processes import GONE_WITHIN_S, Owners, run, says, wait_until_nothing_is_left

pytestmark = pytest.mark.integration

DRIVER = """
import os, sys
from pathlib import Path
from infra.clusters import ClusterRecord, connect
import ray
connect(ClusterRecord.load(Path(sys.argv[1])))
@ray.remote
class Counter:
    def __init__(self): self.count = 0
    def add(self): self.count += 1; return self.count, os.getpid(), os.environ.get("STORE_SECRET")
counter = Counter.options(name="counter", lifetime="detached", num_cpus=1).remote()
print(*ray.get(counter.add.remote(), timeout=30), flush=True)
input()
"""

BEHEADED = """
import os, signal, sys
from pathlib import Path
from infra.clusters import connect, lease_cluster
from infra.errors import ClusterError
record = lease_cluster("phoenix", directory=Path(sys.argv[1]), num_cpus=1, object_store_mb=80)
print(record.model_dump_json(), flush=True)
connect(record)
for process in record.head:
    os.kill(process.pid, signal.SIGKILL)
while record.is_running:
    pass
try:
    connect(record)
except ClusterError as error:
    print(error, flush=True)
input()
"""


@pytest.fixture
def owners(tmp_path: Path) -> Iterator[Owners]:
    owners = Owners(tmp_path)
    yield owners
    owners.end()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clusters")


def _lease(directory: Path) -> ClusterRecord:
    return lease_cluster(
        "shared",
        directory=directory,
        num_cpus=2,
        object_store_mb=80,
        environment={"STORE_SECRET": "xyz"},
        imported=IMPORTED,
    )


@pytest.fixture(scope="module")
def shared(directory: Path) -> Iterator[ClusterRecord]:
    """One cluster, held by the tests' own process, for all that does not end it."""
    record = _lease(directory)
    yield record
    release_cluster("shared")
    wait_until_nothing_is_left(record)
    assert "forked_processes" not in (record.log_dir / "ray" / "raylet.err").read_text()


@pytest.fixture
def connected(shared: ClusterRecord) -> Iterator[ClusterRecord]:
    connect(shared)
    yield shared
    disconnect()


def test_a_detached_actor_outlives_a_killed_driver_that_does_not_hold_the_lease(
    connected: ClusterRecord, directory: Path
) -> None:
    driver = run(DRIVER, str(directory / "shared.json"))
    count, pid, secret = says(driver).split()
    assert (count, secret) == ("1", "xyz")
    driver.kill()
    driver.communicate()
    counter = ray.get_actor("counter", namespace=connected.namespace)
    assert ray.get(counter.add.remote(), timeout=30) == (2, int(pid), "xyz")
    assert int(pid) in {process.pid for process in leftover_processes(connected.mark)}
    ray.kill(counter)


def test_actors_are_forked_from_a_process_that_has_imported_and_without_it_import_for_themselves(
    connected: ClusterRecord,
) -> None:
    class Actor:
        def known(self) -> tuple[set[str], int]:
            return set(sys.modules), os.getpid()

    actor: Any = ray.remote(num_cpus=0)(Actor)
    with_it = actor.remote()
    knows, pid = ray.get(with_it.known.remote(), timeout=60)
    server = psutil.Process(pid).parents()[1]
    assert knows >= set(IMPORTED)
    assert "prefect" not in knows
    assert server in leftover_processes(connected.mark)
    server.kill()
    assert not ray.get(actor.remote().known.remote(), timeout=60)[0] & set(IMPORTED)
    assert ray.get(with_it.known.remote(), timeout=60)[1] == pid


def test_a_second_lease_of_the_name_is_the_warm_cluster(shared: ClusterRecord, directory: Path) -> None:
    assert _lease(directory).head == shared.head


def _end(pid: int) -> None:
    process = psutil.Process(pid)
    process.kill()
    deadline = time.monotonic() + 10
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} did not end within 10 s of SIGKILL"
        time.sleep(0.01)


def test_a_killed_watchdog_is_replaced_while_the_cluster_runs_on(shared: ClusterRecord, directory: Path) -> None:
    deadline = time.monotonic() + GONE_WITHIN_S
    former = _lease(directory).watchdog_pid
    _end(former)
    written = shared
    while written.watchdog_pid in {former, shared.watchdog_pid}:
        assert time.monotonic() < deadline, "no other watchdog was started in 30 s"
        time.sleep(0.1)
        written = ClusterRecord.load(directory / "shared.json")
    _end(written.watchdog_pid)
    again = _lease(directory)  # at once: no heartbeat is waited for
    assert again.watchdog_pid != written.watchdog_pid
    assert again.watchdog is not None
    assert again.watchdog.process() is not None
    assert again.head == shared.head


def test_a_head_gives_up_a_silent_machine_before_those_do_who_ask_its_actors(shared: ClusterRecord) -> None:
    told = psutil.Process(shared.head_pid).environ()
    assert SILENT_NODE.items() <= told.items()
    period, answer, tries = (
        int(told[f"RAY_health_check_{name}"]) for name in ("period_ms", "timeout_ms", "failure_threshold")
    )
    assert (period + answer) * tries / 1000 < ANSWER_S


def test_connecting_keeps_the_signal_handlers_and_the_environment(shared: ClusterRecord) -> None:
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


def test_a_thread_can_connect_as_tasks_do(shared: ClusterRecord) -> None:
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


def test_two_clusters_at_once_do_not_meet(owners: Owners, connected: ClusterRecord) -> None:
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
    wait_until_nothing_is_left(other)
    assert connected.is_running
    connect(connected)
    assert ray.cluster_resources()["CPU"] == 2
    with pytest.raises(ClusterError, match=r"'night' at .* is gone: its processes have ended; see"):
        connect(other)


def test_a_wrong_token_is_told_in_one_sentence(shared: ClusterRecord, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("wrong")
    shutil.copy(shared.certificate, tmp_path)
    with pytest.raises(ClusterError, match=r"'shared' at .* does not answer: .*[Aa]uth.*; see") as caught:
        connect(shared.model_copy(update={"temp_dir": tmp_path}))
    assert "\n" not in str(caught.value)
    connect(shared)  # the right one is not forgotten for it
    disconnect()


def test_another_certificate_is_told_in_one_sentence(shared: ClusterRecord, tmp_path: Path) -> None:
    shutil.copy(shared.token, tmp_path)
    (tmp_path / "tls.pem").write_text(own_certificate("another cluster's"))
    with pytest.raises(ClusterError, match=r"'shared' at .* does not answer: .*; see") as caught:
        connect(shared.model_copy(update={"temp_dir": tmp_path}), timeout_s=5)
    assert "\n" not in str(caught.value)
    connect(shared)
    disconnect()


def test_an_absent_token_certificate_or_address_is_told_at_once(shared: ClusterRecord, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=f"token file {tmp_path}/token is not there"):
        connect(shared.model_copy(update={"temp_dir": tmp_path}))
    shutil.copy(shared.token, tmp_path)
    with pytest.raises(ClusterError, match=f"certificate {tmp_path}/tls.pem is not there"):
        connect(shared.model_copy(update={"temp_dir": tmp_path}))
    with pytest.raises(ClusterError, match="'shared' has not finished starting"):
        connect(shared.model_copy(update={"address": ""}))


def test_a_control_server_that_hangs_is_told_by_the_deadline(shared: ClusterRecord) -> None:
    head = psutil.Process(shared.head_pid)
    head.suspend()
    try:
        with pytest.raises(ClusterError, match=r"'shared' at .* did not answer within 1 s"):
            connect(shared, timeout_s=1)
    finally:
        head.resume()
    connect(shared)
    disconnect()


def test_a_cluster_that_lost_its_head_is_told_and_ended_and_another_process_starts_it_anew(tmp_path: Path) -> None:
    """In another process: Ray does not always let a driver go whose control server was killed."""
    flow = run(BEHEADED, str(tmp_path))
    first = ClusterRecord.model_validate_json(says(flow))
    try:
        assert "is gone: its processes have ended" in says(flow)
    finally:
        flow.kill()
        flow.communicate()
    wait_until_nothing_is_left(first)
    second = lease_cluster("phoenix", directory=tmp_path, num_cpus=1, object_store_mb=80)
    try:
        assert second.mark != first.mark
        connect(second)
        assert ray.cluster_resources()["CPU"] == 1
    finally:
        release_cluster("phoenix")
    assert not leftover_processes(second.mark, second.head)
    assert not ray.is_initialized()
    release_cluster("phoenix")  # and once more: not held is fine


def test_a_start_that_takes_too_long_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ClusterNotReadyError, match=r"'slow' did not start within 0\.2 s; raise start_timeout_s"):
        lease_cluster("slow", directory=tmp_path, num_cpus=1, object_store_mb=80, start_timeout_s=0.2)
    assert not list(tmp_path.glob("*.json"))
    assert not [entry for entry in tmp_path.rglob("*") if entry.name.startswith("rf-")]


def test_a_call_of_a_process_that_is_not_connected_starts_no_cluster() -> None:
    with pytest.raises(ray.exceptions.RaySystemError, match="not been started"):
        ray.get_actor("trainer")
    assert not ray.is_initialized()

"""A user's own cluster: what a run has there ends with its driver, however that ends; all else stays.

The user's cluster is a real one, in which he runs an actor and keeps room, under the names that our runs use.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from infra.clusters import connect, lease_cluster, lease_existing, release_cluster
from infra.clusters.control_server import ControlServer
from infra.clusters.existing import WATCHERS
from infra.errors import ClusterError
from rlhf_core.ray_tools.placement import place
from tests.integration.existing_cluster import (
    Bystander,
    Driver,
    User,
    are_gone,
    as_users_start_them,
    wait_until,
)

pytestmark = pytest.mark.integration

ASKS = """
import sys
from infra.clusters import existing_resources
from infra.errors import ClusterError
for address in sys.argv[1:]:
    try:
        print(existing_resources(address)["GPU"], "GPUs")
    except ClusterError as error:
        print(error)
"""
LEASES = """
import sys
import ray
from infra.clusters import lease_existing
from infra.errors import ClusterError
for package in ("made_up", "pip", "infra"):
    if package == "infra":
        ray.__version__ = "0.1"
    try:
        lease_existing("night", address=sys.argv[1], packages=[package])
    except ClusterError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    with pytest.MonkeyPatch.context() as patch, as_users_start_them():
        cluster = lease_cluster(
            "theirs", directory=tmp_path_factory.mktemp("c"), num_cpus=4, num_gpus=2, object_store_mb=80
        )
        connect(cluster)
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(cluster.token))
        placed = place({"trainer": {"num_cpus": 1}}, group="ppo", timeout_s=30)
        bystander: Any = Bystander
        actor = bystander.options(name="trainer", **placed["trainer"]).remote()
        with closing(ControlServer(cluster.address)) as server:
            yield User(cluster, server, ray.get(actor.pid.remote(), timeout=60))
        release_cluster("theirs")


@pytest.fixture
def start(user: User) -> Iterator[Callable[..., Driver]]:
    started: list[Driver] = []

    def begin(stalled_after_s: float = 120, host: str | None = None) -> Driver:
        started.append(Driver(user, stalled_after_s, host))
        return started[-1]

    yield begin
    for driver in started:
        driver.process.kill()
        driver.process.communicate()
    wait_until(user.is_alone)


def _kill(driver: Driver) -> None:
    driver.process.kill()


def _kill_group_and_descendants(driver: Driver) -> None:
    for child in psutil.Process(driver.process.pid).children(recursive=True):
        child.kill()
    os.killpg(driver.process.pid, signal.SIGKILL)


def _stop_group(driver: Driver) -> None:
    os.killpg(driver.process.pid, signal.SIGSTOP)


def _let_it_release(driver: Driver) -> None:
    assert driver.do("release") == "released"
    assert are_gone(driver)()  # at once


def _let_it_raise(driver: Driver) -> None:
    driver.do("raise")


def _let_it_return(driver: Driver) -> None:
    driver.do("return")


def _stop_an_actor_and_kill(driver: Driver) -> None:
    os.kill(driver.actors[0].pid, signal.SIGSTOP)
    driver.process.kill()


@pytest.mark.parametrize(
    "ends",
    [
        _kill,
        pytest.param(_stop_group, marks=pytest.mark.clusters),
        pytest.param(_let_it_release, marks=pytest.mark.clusters),
        pytest.param(_kill_group_and_descendants, marks=pytest.mark.clusters),
        pytest.param(_stop_an_actor_and_kill, marks=pytest.mark.clusters),
        pytest.param(_let_it_raise, marks=pytest.mark.clusters),
        pytest.param(_let_it_return, marks=pytest.mark.clusters),
        pytest.param(lambda driver: driver.process.terminate(), marks=pytest.mark.clusters, id="_terminate"),
    ],
)
def test_what_a_run_has_on_the_cluster_ends_with_its_driver_and_nothing_else_does(
    user: User, start: Callable[..., Driver], ends: Callable[[Driver], None]
) -> None:
    driver = start(stalled_after_s=2 if ends is _stop_group else 120).holds()
    there = user.there()
    assert sorted(there) == ["rlhf", WATCHERS, next(space for space in there if space.startswith("rlhf:night:"))]
    assert user.groups().count("ppo") == 2  # his and the run's
    ends(driver)
    wait_until(are_gone(driver))
    wait_until(user.is_alone)


@pytest.mark.clusters
def test_a_name_is_held_by_one_living_process_and_taken_over_from_a_dead_one(
    user: User, start: Callable[..., Driver]
) -> None:
    first = start().holds()
    refused = start()
    held = f"run 'night' is held on the Ray cluster at {user.cluster.address} by process {first.process.pid} on "
    assert refused.said.startswith(held)
    assert first.do("again")  # and nothing of it was touched
    watcher = psutil.Process(user.watcher_pid())
    watcher.suspend()  # or it would be first
    first.process.kill()
    second = start(host="localhost").holds()  # by another name
    assert are_gone(first)()
    wait_until(lambda: not watcher.is_running())
    assert not are_gone(second)()
    assert user.has_all_his_own()


@pytest.mark.clusters
def test_without_driver_and_watcher_the_next_holder_of_the_name_clears_away_what_is_left(
    user: User, start: Callable[..., Driver]
) -> None:
    first = start().holds()
    os.kill(first.process.pid, signal.SIGSTOP)  # it would start another watcher
    user.server.kill(user.server.actors(lambda actor: actor.ray_namespace == WATCHERS))
    first.process.kill()
    wait_until(lambda: WATCHERS not in user.there())
    assert first.actors[0].process() is not None  # detached: it lives on, unwatched
    second = start().holds()
    assert are_gone(first)()
    assert not are_gone(second)()


@pytest.mark.clusters
@pytest.mark.parametrize("for_good", [False, True])
def test_a_watcher_that_was_ended_is_replaced(user: User, start: Callable[..., Driver], *, for_good: bool) -> None:
    driver = start().holds()
    former = user.watcher_pid()
    if for_good:
        user.server.kill(user.server.actors(lambda actor: actor.ray_namespace == WATCHERS))
    else:
        os.kill(former, signal.SIGKILL)
    wait_until(lambda: WATCHERS in user.there() and user.watcher_pid() not in {0, former})
    driver.process.kill()
    wait_until(are_gone(driver))


@pytest.mark.clusters
def test_a_driver_that_was_stopped_and_goes_on_finds_its_actors_gone_and_can_start_others(
    user: User, start: Callable[..., Driver]
) -> None:
    driver = start(stalled_after_s=2).holds()
    driver.process.send_signal(signal.SIGSTOP)
    wait_until(user.is_alone)
    driver.process.send_signal(signal.SIGCONT)
    assert int(driver.do("again"))


@pytest.mark.clusters
def test_a_watcher_that_was_stopped_itself_does_not_take_that_for_the_drivers_silence(
    user: User, start: Callable[..., Driver]
) -> None:
    driver = start(stalled_after_s=3).holds()
    watcher = psutil.Process(user.watcher_pid())
    watcher.suspend()
    time.sleep(6)  # what the driver says meanwhile waits to be read
    watcher.resume()
    time.sleep(3)
    assert watcher.is_running()
    assert not are_gone(driver)()


def _told(program: str, *arguments: str, **variables: str) -> list[str]:
    """Return the lines of a program that runs by itself, with the user's token unless told otherwise."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **variables},
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    )
    return done.stdout.splitlines()


def test_an_address_where_nobody_answers_or_a_wrong_token_is_told_in_one_sentence(user: User, tmp_path: Path) -> None:
    address = user.cluster.address
    nowhere, client, nobody, answers = _told(ASKS, "nowhere", "ray://10.0.0.5:10001", "127.0.0.1:9", address)
    assert nowhere.startswith("'nowhere' is no address of a Ray cluster: host and port of its control server")
    assert client.startswith("'ray://10.0.0.5:10001' is no address of a Ray cluster")
    assert nobody.startswith("the Ray cluster at 127.0.0.1:9 does not answer: ")
    assert answers == "2.0 GPUs"
    (wrong,) = _told(ASKS, address, RAY_AUTH_TOKEN="f" * 32)
    assert wrong.startswith(f"the Ray cluster at {address} does not answer: InvalidAuthToken")
    assert "set RAY_AUTH_TOKEN_PATH (or RAY_AUTH_TOKEN) to the token that it was started with" in wrong
    (unreadable,) = _told(ASKS, address, RAY_AUTH_TOKEN_PATH=str(tmp_path / "none"))
    assert unreadable.startswith("Ray's token cannot be read: RAY_AUTH_TOKEN_PATH is set but file cannot be opened")
    (without,) = _told(ASKS, address, RAY_AUTH_MODE="disabled")  # the user's word, which we do not overrule
    assert "does not answer: InvalidAuthToken" in without


def test_a_cluster_with_other_code_or_versions_is_told_in_one_sentence(user: User, tmp_path: Path) -> None:
    for name in ("made_up", "pip"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    lacks, other, version = _told(LEASES, user.cluster.address, PYTHONPATH=path)
    assert "of the Ray cluster has no package made_up; install this commit there" in lacks
    assert "of the Ray cluster has other code of package pip; install this commit there" in other
    assert "does not take this process as a driver: Version mismatch: The cluster was started with: Ray: " in version
    assert "was started with: Ray: 0.1 Python: " in version


def test_a_process_that_is_connected_already_is_told_to_leave_first(user: User) -> None:
    with pytest.raises(ClusterError, match=r"in the namespace 'rlhf', not to .* as run 'night'; call disconnect\(\)"):
        lease_existing("night", address=user.cluster.address)

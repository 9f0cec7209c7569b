"""Room on a cluster is given to all actors of a run or to none, on a real cluster with logical GPUs."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from infra.clusters import connect, lease_cluster, release_cluster
from rlhf_core.errors import NoRoomError
from rlhf_core.ray_tools.placement import place, vacate

pytestmark = pytest.mark.integration


@ray.remote
class Guest:
    def where(self) -> tuple[str, list[str]]:
        context = ray.get_runtime_context()
        return context.get_placement_group_id(), context.get_accelerator_ids()["GPU"]


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Four CPUs and two GPUs that exist only in Ray's books."""
    connect(lease_cluster("rooms", directory=tmp_path_factory.mktemp("c"), num_cpus=4, num_gpus=2, object_store_mb=80))
    yield
    release_cluster("rooms")


def _free() -> tuple[float, float]:
    free = ray.available_resources()
    return free.get("CPU", 0), free.get("GPU", 0)


def _is_free(cpus: float, gpus: float) -> bool:
    """Whether so much is free within seconds: Ray's books are a moment behind."""
    deadline = time.monotonic() + 20
    while _free() != (cpus, gpus):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_actors_run_on_what_was_kept_for_them_and_trainers_choose_first() -> None:
    trainer, maker = {"num_cpus": 1, "num_gpus": 1}, {"num_cpus": 1, "num_gpus": 0.5}
    placed = place({"trainer": trainer, "maker-0": maker, "maker-1": maker}, group="run", timeout_s=30)
    assert _is_free(1, 0)  # before any of them has started
    actors: dict[str, Any] = {name: Guest.options(**options).remote() for name, options in placed.items()}
    where = {name: ray.get(actor.where.remote(), timeout=60) for name, actor in actors.items()}
    assert len({group for group, _ in where.values()}) == 1
    assert where["maker-0"][1] == where["maker-1"][1] != where["trainer"][1]  # halves of one GPU
    ray.kill(actors["maker-1"])
    again = Guest.options(**placed["maker-1"]).remote()  # the share of one that ended
    assert ray.get(again.where.remote(), timeout=60) == where["maker-1"]
    vacate("run")
    assert _is_free(4, 2)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actors["trainer"].where.remote(), timeout=30)
    vacate("run")  # and once more: none is fine


def test_room_that_is_not_there_is_told_by_the_deadline_and_nothing_stays_reserved() -> None:
    other = Guest.options(num_cpus=3).remote()
    ray.get(other.where.remote(), timeout=60)
    started = time.monotonic()
    with pytest.raises(NoRoomError) as caught:
        place({"trainer": {"num_cpus": 1}, "maker-0": {"num_cpus": 1}}, group="run", timeout_s=1)
    assert time.monotonic() - started < 10
    assert "waited 1 s for room for 2 x (1 CPU) on the Ray cluster, which has 1 of 4 CPU and 2 of 2 GPU free" in str(
        caught.value
    )
    assert _is_free(1, 2)  # not one of the two was kept
    ray.kill(other)
    assert _is_free(4, 2)

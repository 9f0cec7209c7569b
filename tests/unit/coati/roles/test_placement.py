"""What each process gets of a cluster, and how what is lacking is said."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rlhf_core.coati.roles.placement import Allotment, Room, decide, present, wanted
from rlhf_core.errors import ConfigError
from rlhf_core.ray_tools import placement

PROCESSES = {"actor": 2, "critic": 1, "initial": 1, "reward": 1}


def test_each_process_has_a_gpu_where_there_are_enough_and_nothing_is_said() -> None:
    assert decide(PROCESSES, gpus=5, told=None, threads=1) == (Allotment(1, 1.0), "")


def test_with_fewer_all_work_on_cpus_which_is_said_in_one_line() -> None:
    allotment, line = decide(PROCESSES, gpus=4, told=None, threads=3)
    assert allotment == Allotment(3, 0.0)
    assert line == (
        "the cluster has 4 GPUs for 5 processes (actor 2, critic 1, initial 1, reward 1): all of them work on CPUs; "
        "--gpus_per_actor 0.5 would share the GPUs"
    )


def test_without_any_all_work_on_cpus() -> None:
    allotment, line = decide(PROCESSES, gpus=0, told=None, threads=1)
    assert allotment.gpus == 0
    assert line == "the cluster has no GPU: all 5 processes of the four models work on CPUs"


def test_gpus_are_shared_as_told() -> None:
    allotment, line = decide(PROCESSES, gpus=2, told=0.33, threads=1)
    assert allotment.gpus == 0.33
    assert "each of 5 processes" in line
    assert decide(PROCESSES, gpus=8, told=0.0, threads=1).allotment.gpus == 0
    with pytest.raises(ConfigError, match=r"--gpus_per_actor 0\.5 for each of 5 processes .* 2\.5 GPUs, but .* has 2;"):
        decide(PROCESSES, gpus=2, told=0.5, threads=1)


@pytest.mark.parametrize(("gpus", "number"), [(1, 6), (2, 12), (3, 4), (1, 4), (7, 50)])
def test_the_share_that_is_suggested_is_taken_and_has_room_on_the_gpus(gpus: int, number: int) -> None:
    processes = {"actor": number - 3, "critic": 1, "initial": 1, "reward": 1}
    line = decide(processes, gpus=gpus, told=None, threads=1).line
    told = float(line.split("--gpus_per_actor ")[1].split()[0])
    assert decide(processes, gpus=gpus, told=told, threads=1).allotment.gpus == told
    assert gpus * math.floor(1 / told) >= number


@pytest.mark.parametrize(
    ("share", "processes", "gpus"),
    [
        (0.3, 3, 0.9),
        (0.3, 4, 1.3),
        (0.3, 7, 2.3),
        (0.5, 5, 2.5),
        (0.16, 6, 0.96),
        (0.7, 2, 1.7),
        (0.1, 3, 0.3),
        (2, 3, 6),
    ],
)
def test_no_process_is_on_parts_of_two_gpus(share: float, processes: int, gpus: float) -> None:
    assert Allotment(1, share).bundle(processes)["GPU"] == gpus
    assert decide({"actor": processes}, gpus=gpus, told=share, threads=1).allotment.gpus == share
    with pytest.raises(ConfigError, match="none on parts of two GPUs"):
        decide({"actor": processes}, gpus=gpus - 0.001, told=share, threads=1)


class Reserved:
    """A placement group."""

    removed = False

    def __init__(self, bundles: list[dict[str, float]], strategy: str) -> None:
        self.bundles, self.strategy = bundles, strategy

    def wait(self, _: float) -> bool:
        return True


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[Reserved]:
    found: list[Reserved] = []

    def reserve(bundles: list[dict[str, float]], strategy: str, name: str) -> Reserved:
        assert not name
        found.append(Reserved(bundles, strategy))
        return found[-1]

    def place(group: Reserved, placement_group_bundle_index: int) -> tuple[Reserved, int]:
        return group, placement_group_bundle_index

    monkeypatch.setattr(placement, "placement_group", reserve)
    monkeypatch.setattr(placement, "PlacementGroupSchedulingStrategy", place)
    monkeypatch.setattr(placement, "remove_placement_group", lambda group: setattr(group, "removed", True))
    return found


def test_a_process_has_a_bundle_of_its_own_on_one_node_and_its_nodes_on_several(reserved: list[Reserved]) -> None:
    def places(room: Room, number: int) -> list[Any]:
        return [room.options(rank)["scheduling_strategy"][1] for rank in range(number)]

    assert places(Room("actor", 1, 4, Allotment(1, 0.3), timeout_s=1), 4) == [0, 1, 2, 3]
    assert places(Room("actor", 2, 4, Allotment(1, 0.3), timeout_s=1), 8) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [(each.strategy, each.bundles) for each in reserved] == [
        ("STRICT_PACK", [{"CPU": 1, "GPU": 0.3}] * 4),
        ("STRICT_SPREAD", [{"CPU": 4, "GPU": 1.3}] * 2),
    ]


def test_room_is_given_back_whatever_waiting_for_it_ends_with(
    reserved: list[Reserved], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Reserved, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Room("actor", 1, 2, Allotment(1, 0.0), timeout_s=1)
    assert [each.removed for each in reserved] == [True]


def test_processes_without_a_gpu_see_none_and_have_their_threads() -> None:
    options = Allotment(2, 0.0).options()
    assert (options["num_cpus"], options["num_gpus"]) == (2, 0.0)
    assert options["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] == ""
    assert options["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "2"
    assert "CUDA_VISIBLE_DEVICES" not in Allotment(2, 0.5).options()["runtime_env"]["env_vars"]


def test_what_is_lacking_is_said_in_words() -> None:
    assert wanted("actor", 3, Allotment(2, 1.0).bundle(4)) == (
        "the actor group wants 3 nodes with 8 CPUs and 4 GPUs free on each"
    )
    assert wanted("critic", 1, Allotment(1, 0.0).bundle(1)) == "the critic group wants 1 node with 1 CPU free on each"
    assert present([{"CPU": 4.0, "GPU": 1.0}, {"CPU": 2.0}]) == (
        "2 nodes with 4 CPUs and 1 GPU; 2 CPUs and 0 GPUs, others' share included"
    )

"""What each process gets of a cluster, and how what is lacking is said."""

from __future__ import annotations

import pytest

from rlhf_core.detached.roles.placement import Share, decide, present, wanted
from rlhf_core.errors import ConfigError

PROCESSES = {"actor": 2, "critic": 1, "initial": 1, "reward": 1}


def test_each_process_has_a_gpu_where_there_are_enough_and_nothing_is_said() -> None:
    assert decide(PROCESSES, gpus=5, told=None, threads=1) == (Share(1, 1.0), "")


def test_with_fewer_all_work_on_cpus_which_is_said_in_one_line() -> None:
    share, line = decide(PROCESSES, gpus=4, told=None, threads=3)
    assert share == Share(3, 0.0)
    assert line == (
        "the cluster has 4 GPUs for 5 processes (actor 2, critic 1, initial 1, reward 1): all of them work on CPUs; "
        "--gpus_per_actor 0.8 would share the GPUs"
    )


def test_without_any_all_work_on_cpus() -> None:
    share, line = decide(PROCESSES, gpus=0, told=None, threads=1)
    assert share.gpus == 0
    assert line == "the cluster has no GPU: all 5 processes of the four models work on CPUs"


def test_gpus_are_shared_as_told() -> None:
    share, line = decide(PROCESSES, gpus=2, told=0.4, threads=1)
    assert share.gpus == 0.4
    assert "each of 5 processes" in line
    assert decide(PROCESSES, gpus=8, told=0.0, threads=1).share.gpus == 0
    with pytest.raises(ConfigError, match=r"--gpus_per_actor 0\.5 for each of 5 processes .* 2\.5 GPUs, but .* has 2;"):
        decide(PROCESSES, gpus=2, told=0.5, threads=1)


def test_processes_without_a_gpu_see_none_and_have_their_threads() -> None:
    options = Share(2, 0.0).options()
    assert (options["num_cpus"], options["num_gpus"]) == (2, 0.0)
    assert options["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] == ""
    assert options["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "2"
    assert "CUDA_VISIBLE_DEVICES" not in Share(2, 0.5).options()["runtime_env"]["env_vars"]


def test_what_is_lacking_is_said_in_words() -> None:
    assert wanted("actor", 3, Share(2, 1.0).bundle(4)) == (
        "the actor group wants 3 nodes with 8 CPUs and 4 GPUs free on each"
    )
    assert wanted("critic", 1, Share(1, 0.0).bundle(1)) == "the critic group wants 1 node with 1 CPU free on each"
    assert present([{"CPU": 4.0, "GPU": 1.0}, {"CPU": 2.0}]) == (
        "2 nodes with 4 CPUs and 1 GPUs; 2 CPUs and 0 GPUs, others' share included"
    )

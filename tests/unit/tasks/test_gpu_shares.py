from __future__ import annotations

import pytest

from rlhf_core.config import ClusterConfig
from tasks.gpu_allocation import gpu_shares, trainer_share


@pytest.mark.parametrize(("gpus", "trainers"), [(n, t) for n in range(9) for t in (1, 2, 3, 4, 8)])
def test_every_actor_finds_its_place(gpus: int, trainers: int) -> None:
    for makers in range(1, 9):
        trainer, maker = gpu_shares(ClusterConfig(num_makers=makers), gpus, trainers)
        free = [1.0] * gpus
        places = []
        for share in (*[trainer] * trainers, *[maker] * makers):  # as Ray places: a whole GPU, or a share of one
            if share == 0:
                assert gpus == 0
                continue
            fitting = [index for index, left in enumerate(free) if left + 1e-9 >= share]
            assert fitting, (gpus, trainers, makers, trainer, maker)
            free[fitting[0]] -= share
            places.append(fitting[0])
        if gpus >= trainers:
            assert len(set(places[:trainers])) == trainers, "NCCL wants a GPU for each rank"


def test_one_trainer_and_its_makers_have_what_they_always_had() -> None:
    # GPUs of the machine, makers: GPUs of the trainer, of each maker
    known = {(1, 2): (0.5, 0.25), (2, 3): (1.0, 0.33), (3, 3): (1.0, 0.5), (8, 8): (1.0, 0.5), (4, 2): (1.0, 1.0)}
    for (gpus, makers), shares in known.items():
        assert gpu_shares(ClusterConfig(num_makers=makers), gpus) == shares


def test_trainers_without_makers_beside_them_have_all() -> None:
    assert [trainer_share(ClusterConfig(), gpus, 2) for gpus in (0, 1, 2, 4)] == [0.0, 0.5, 1.0, 1.0]


def test_what_the_configuration_says_is_taken() -> None:
    assert gpu_shares(ClusterConfig(trainer_gpus=0.25, maker_gpus=0.5), 4) == (0.25, 0.5)
    assert gpu_shares(ClusterConfig(trainer_gpus=0.6, num_makers=1), 2, 2) == (0.6, 0.4)

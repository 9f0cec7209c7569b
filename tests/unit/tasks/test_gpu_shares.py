from __future__ import annotations

import pytest

from rlhf_core.config import ClusterConfig
from tasks.ppo_group import gpu_shares


@pytest.mark.parametrize(("gpus", "makers"), [(n, m) for n in range(9) for m in range(1, 9)])
def test_every_actor_finds_its_place(gpus: int, makers: int) -> None:
    trainer, maker = gpu_shares(ClusterConfig(num_makers=makers), gpus)
    free = [1.0] * gpus
    for share in (trainer, *[maker] * makers):  # as Ray places: a whole number of GPUs, or a share of one
        if share == 0:
            assert gpus == 0
            continue
        places = [index for index, left in enumerate(free) if left + 1e-9 >= share]
        assert places, (gpus, makers, trainer, maker)
        free[places[0]] -= share


def test_what_the_configuration_says_is_taken() -> None:
    assert gpu_shares(ClusterConfig(trainer_gpus=0.25, maker_gpus=0.5), 4) == (0.25, 0.5)

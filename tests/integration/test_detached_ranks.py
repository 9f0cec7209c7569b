"""Trainers in the form of coati's: ranks of one group, wired to all makers, learn what one does with larger batches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ray

from rlhf_core.coati.detached.building import LearningOptions
from rlhf_core.coati.detached.ppo_trainer import DetachedPPOTrainer
from rlhf_core.coati.detached.scheduled_fit import DealingOptions
from rlhf_core.coati.strategy import Strategy
from rlhf_core.errors import ConfigError, LostRankError
from tests.integration import equality
from tests.integration.detached_models import (
    LIMIT_S,
    OPTIONS,
    MakerNotes,
    Notes,
    batches,
    cluster,
    end,
    in_parts,
    in_stages,
    maker,
    notes,
    plain,
    run,
    trained,
    wait_until_free,
)
from tests.parallel.processes import free_port
from tests.unit.coati.ppo_trainers import record_stats, trainer

pytestmark = [pytest.mark.integration, pytest.mark.parallel]

LR = 1e-3
TRAINERS = ["trainer_0", "trainer_1"]


@pytest.fixture(scope="module", autouse=True)
def on_a_cluster(tmp_path_factory: pytest.TempPathFactory, forked: dict[str, str]) -> Iterator[None]:
    with patch.dict(os.environ, forked), cluster(tmp_path_factory.mktemp("clusters")):
        yield


def schedule(step: int) -> float:
    return 1 / (1 + 0.1 * step)  # as the trainers of `ppo_trainers` have it


def ranks(
    makers: list[str], directory: Path, strategy: Callable[[], Strategy] = plain, *, batch_size: int = 2
) -> list[Any]:
    """Return the handles of two trainers that are one group's ranks."""
    port = str(free_port())
    made = []
    for rank, name in enumerate(TRAINERS):
        env_info = {
            "rank": str(rank), "local_rank": "0", "world_size": "2", "master_port": port, "master_addr": "127.0.0.1",
        }  # fmt: skip
        made.append(
            DetachedPPOTrainer.options(name=name, num_gpus=1, num_cpus=0).remote(
                makers, strategy, trained, env_info, train_batch_size=batch_size, value_clip=0.2,
                callbacks=[Notes(directory / name)], options=OPTIONS,
                learning=LearningOptions(lr=LR, lr_schedule=schedule, max_new_tokens=4),
                dealing=DealingOptions(seed=3, start_timeout_s=300.0),
            )
        )  # fmt: skip
    return made


@pytest.mark.parametrize(
    ("strategy", "count"),
    [(plain, 1), (plain, 2), (in_parts, 2), (in_stages, 1)],
)
def test_two_trainers_learn_what_one_does_with_all_their_rows(
    strategy: Callable[[], Strategy], count: int, tmp_path: Path
) -> None:
    """Each has its own half of a step's rows; those who hold one model together have all of them."""
    rows = 2 if strategy is plain else 4
    names = [f"maker_{number}" for number in range(count)]
    ours = trainer(options=OPTIONS, seed=3, lr=LR, train_batch_size=4)
    stats = record_stats(ours)
    ours.fit(5, 4, 3, batches())
    # Every maker names every trainer, and every trainer every maker: coati's protocol stops dead.
    handles = [
        maker(name, TRAINERS, callbacks=[MakerNotes(tmp_path / name)], sync_models_from_trainers=True) for name in names
    ]
    both = ranks(names, tmp_path, strategy, batch_size=rows)
    ray.get([each.sync_models_to_remote_makers.remote() for each in both], timeout=LIMIT_S)
    steps = [10] * 2 if count == 2 else [20]
    run(both, handles, batches, steps, 10, 2, 3)  # five episodes of two batches, on each
    for name in TRAINERS:
        found = notes(tmp_path / name)
        assert [each["rows"] for each in found] == [rows] * 30
        assert [each["actor_loss"] for each in found] == pytest.approx(
            [each.actor_loss for each in stats], rel=1e-3, abs=2e-5
        )
        assert [each["critic_loss"] for each in found] == pytest.approx(
            [each.critic_loss for each in stats], rel=1e-4, abs=1e-5
        )
        mine = [(each["actor_loss"], each["critic_loss"]) for each in found]
        theirs = [(each.actor_loss, each.critic_loss) for each in stats]
    equality.keep(f"coati's, 2 trainers ({strategy.__name__}) x {count} makers (one with all rows)", mine, theirs)
    made = [len((tmp_path / name).read_text()) for name in names]
    assert sum(made) == 20
    assert all(made)
    end(*both, *handles)
    for name in (*TRAINERS, *names):
        wait_until_free(name)


def test_a_rank_that_dies_is_named_and_fits_that_differ_are_refused(tmp_path: Path) -> None:
    both = ranks([], tmp_path)
    with pytest.raises(ConfigError, match=r"fit of rank 1 has total_steps"):
        ray.get([both[0].fit.remote(8, 2), both[1].fit.remote(8, 4)], timeout=LIMIT_S)
    end(*both)
    for name in TRAINERS:
        wait_until_free(name)
    handle = maker("maker_0", TRAINERS)
    both = ranks(["maker_0"], tmp_path)
    loop = handle.workingloop.remote(batches, num_steps=2000)
    fits = [each.fit.remote(1000, 2, 3) for each in both]
    deadline = time.monotonic() + LIMIT_S
    while len(notes(tmp_path / "trainer_1")) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    end(both[1])
    with pytest.raises(LostRankError, match=r"rank 1 of 2"):
        ray.get(fits[0], timeout=LIMIT_S)
    ray.get(loop, timeout=LIMIT_S)  # the makers' loop ends with the fit
    end(both[0], handle)

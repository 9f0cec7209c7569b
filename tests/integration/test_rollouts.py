"""The flow's actors on a real cluster: `PPOTrainer`'s numbers in lockstep, and overlap whose counts balance."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ray
import torch

from rlhf_core.ppo.state import EpisodeRecord
from tests.integration import equality
from tests.integration.rollout_reference import Reference, alone
from tests.integration.rollout_runs import WAIT_S, cluster, config, rollout_run
from tests.parallel.ranks import run_on_ranks

pytestmark = pytest.mark.integration

LR = 1e-3
LOSSES = ("actor_loss", "critic_loss")


@pytest.fixture(scope="module", autouse=True)
def on_a_cluster(tmp_path_factory: pytest.TempPathFactory, forked: dict[str, str]) -> Iterator[None]:
    torch.set_num_threads(1)
    with patch.dict(os.environ, forked), cluster(tmp_path_factory.mktemp("rollouts")):
        yield


@pytest.fixture(scope="module")
def reference() -> Reference:
    return alone()


def losses(steps: list[dict[str, float]]) -> list[tuple[float, float]]:
    return [(step["actor_loss"], step["critic_loss"]) for step in steps]


def counts(record: EpisodeRecord) -> dict[str, int]:
    names = ("issued", "learnt", "dropped", "lost", "out", "waiting")
    return {name: int(record.rollouts[f"chunks_{name}"]) for name in names}


@pytest.mark.parametrize("makers", [pytest.param(1, marks=pytest.mark.parallel), 2])
def test_in_lockstep_any_number_of_makers_gives_the_numbers_of_ppotrainer(
    makers: int, reference: Reference, tmp_path: Path
) -> None:
    assert len(reference.steps) == 5 * 3 * 2
    with rollout_run(config(cluster={"num_makers": makers}), tmp_path, chunk_s=0.2) as run:
        records = run.run()
        steps, policy = run.finish()
    assert losses(steps) == losses(reference.steps)  # to the bit
    assert all(torch.equal(weight, reference.weights[f"actor.{name}"]) for name, weight in policy.items())
    assert [record.metrics["staleness_max"] for record in records] == [0.0] * 5
    assert [record.rollouts["makers"] for record in records] == [makers] * 5  # each made some of each episode
    assert counts(records[-1]) == {"issued": 20, "learnt": 20, "dropped": 0, "lost": 0, "out": 0, "waiting": 0}
    equality.keep(f"flow, 1 trainer x {makers} makers", losses(steps), losses(reference.steps))


def test_with_staleness_one_makers_work_beside_the_learner_and_between_episodes(tmp_path: Path) -> None:
    settings = config(max_staleness=1, correction="truncated", cluster={"num_makers": 2})
    with rollout_run(settings, tmp_path, chunk_s=0.3, step_s=0.1) as run:
        (first,) = run.run([0])
        run.await_depth(16)  # no call of the trainer is under way: makers make all that they may begin
        (second,) = run.run([1])
        rest = run.run(range(2, 5))
        steps, _ = run.finish()
    records = [first, second, *rest]
    assert second.rollouts["queue_depth"] == 16  # the whole episode was there already
    assert second.seconds["generate"] + second.seconds["score"] < 1.0
    assert all(record.metrics["staleness_max"] <= 1 for record in records)
    assert any(record.metrics["staleness"] > 0 for record in records)
    assert len(steps) == 30
    assert all(step["importance_weight"] != 1.0 for step in steps[-6:])  # the samples are of another policy
    assert counts(records[-1]) == {"issued": 20, "learnt": 20, "dropped": 0, "lost": 0, "out": 0, "waiting": 0}


@pytest.mark.parallel
def test_what_became_too_old_beside_a_slow_trainer_is_dropped_and_made_again(tmp_path: Path) -> None:
    settings = config(
        max_staleness=1, stale_samples="drop", buffer_limit=6, correction="decoupled", cluster={"num_makers": 2}
    )
    with rollout_run(settings, tmp_path, step_s=0.4) as run:
        records = run.run()
    assert all(record.metrics["staleness_max"] <= 1 for record in records)
    final = counts(records[-1])
    assert final["dropped"] > 0
    assert final["learnt"] == 20
    assert final["issued"] == sum(number for name, number in final.items() if name != "issued")
    assert max(record.rollouts["queue_depth"] for record in records) <= 6 * 8


@pytest.mark.parallel
def test_a_maker_that_dies_costs_the_trainer_nothing(reference: Reference, tmp_path: Path) -> None:
    with rollout_run(config(cluster={"num_makers": 2}), tmp_path, chunk_s=0.3) as run:
        run.run([0])
        victim = ray.get(run.makers["maker-0"].ping.remote(), timeout=WAIT_S)
        episode = run.trainer.run_episode.remote(1)
        os.kill(victim, signal.SIGKILL)
        records = [ray.get(episode, timeout=WAIT_S), *run.run([2])]
        run.await_revival("maker-0", victim)
        records += run.run([3, 4])
        steps, _ = run.finish()
    assert losses(steps) == losses(reference.steps)
    assert records[-1].rollouts["makers"] == 2  # the one that came back is at work again
    assert sum(record.rollouts["revivals"] for record in records) == 1
    assert counts(records[-1])["learnt"] == 20


@pytest.mark.parallel
@pytest.mark.parametrize("makers", [1, 2])
def test_two_trainer_ranks_give_the_numbers_of_ppotrainer_on_two_ranks(makers: int, tmp_path: Path) -> None:
    (expected, _) = (found["two_ranks"] for found in _two_ranks(tmp_path / "reference"))
    settings = config(max_epochs=1, strategy="ddp", num_trainers=2, train_batch_size=4, cluster={"num_makers": makers})
    with rollout_run(settings, tmp_path / "run") as run:
        records = run.run()
        steps, policy = run.finish()
    assert len(steps) == 5 * 2
    for number, step in enumerate(steps):
        wanted = {name: expected.numbers[f"{number}.{name}"] for name in (*LOSSES, "approx_kl")}
        assert {name: step[name] for name in wanted} == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    for name, weight in policy.items():
        torch.testing.assert_close(weight, expected.tensors[f"actor.{name}"], rtol=0, atol=LR * len(steps) * 0.01)
    assert [record.metrics["staleness_max"] for record in records] == [0.0] * 5
    theirs = [{name: expected.numbers[f"{number}.{name}"] for name in LOSSES} for number in range(len(steps))]
    equality.keep(f"flow, 2 trainers x {makers} makers (PPOTrainer on two ranks)", losses(steps), losses(theirs))


def _two_ranks(directory: Path) -> Any:
    directory.mkdir()
    return run_on_ranks("tests.integration.rollout_reference", ["two_ranks"], directory, world_size=2)

"""The flow's actors on a real cluster: `PPOTrainer`'s numbers in lockstep, and overlap whose books balance."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rlhf_core.detached.chunks import episode_problems, make_chunks
from rlhf_core.detached.state import EpisodeRecord
from rlhf_core.experience_maker.maker import to_prompts
from rlhf_core.models.critic import Critic
from rlhf_core.strategy.plain import PlainBooster
from rlhf_core.trainer.optim import make_trained
from rlhf_core.trainer.schedules import warmup_then_constant
from tests.integration.dealt_runs import PROBLEMS, SEED, WAIT_S, cluster, config, dealt_run, template
from tests.tiny_llama import tiny_llama
from tests.unit.trainer.ppo_trainers import padded, record_stats, trainer

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", autouse=True)
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.set_num_threads(1)
    with cluster(tmp_path_factory.mktemp("dealing")):
        yield


@pytest.fixture(scope="module")
def reference() -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The steps and the actor of `PPOTrainer`: a batch of prompts for each chunk, micro-batches as training batches."""
    settings, prompts = config(), template()
    batches = []
    for episode in range(settings.episodes):
        problems = episode_problems(PROBLEMS, settings, seed=SEED, episode=episode)
        for chunk in make_chunks(problems, settings, episode=episode):
            rows = to_prompts(chunk.problems, prompts)
            batches.append(padded([{"input_ids": list(row.ids)} for row in rows]) | {"key": [row.key for row in rows]})

    def trained(model: torch.nn.Module) -> Any:
        schedule = warmup_then_constant(1)
        return make_trained(model, lr=1e-3, weight_decay=0.0, schedule=schedule, booster=PlainBooster("fp32", 1.0))

    actor = tiny_llama(initializer_range=0.2)
    first, second = trained(actor), trained(Critic.from_causal_lm(actor))
    ours = trainer(
        actor=first.model, critic=second.model, actor_optim=first.optimizer, critic_optim=second.optimizer,
        actor_lr_scheduler=first.scheduler, critic_lr_scheduler=second.scheduler, actor_booster=first.booster,
        critic_booster=second.booster, train_batch_size=4, accumulation_steps=2, seed=SEED, value_clip=0.2,
    )  # fmt: skip
    stats = record_stats(ours)
    ours.fit(settings.episodes, 4, 3, batches)
    return [step._asdict() for step in stats], {name: weight.detach() for name, weight in actor.named_parameters()}


def losses(steps: list[dict[str, float]]) -> list[tuple[float, float]]:
    return [(step["actor_loss"], step["critic_loss"]) for step in steps]


def books(record: EpisodeRecord) -> dict[str, int]:
    names = ("issued", "learnt", "dropped", "lost", "out", "waiting")
    return {name: int(record.dealing[f"chunks_{name}"]) for name in names}


@pytest.mark.parametrize("makers", [1, 2])
def test_in_lockstep_any_number_of_makers_gives_the_numbers_of_ppotrainer(
    makers: int, reference: tuple[list[dict[str, float]], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    expected, actor = reference
    assert len(expected) == 5 * 3 * 2
    with dealt_run(config(cluster={"num_makers": makers}), tmp_path, chunk_s=0.2) as run:
        records = run.run()
        steps, policy = run.finish()
    assert losses(steps) == losses(expected)  # to the bit
    assert all(torch.equal(policy[name], weight) for name, weight in actor.items())
    assert [record.metrics["staleness_max"] for record in records] == [0.0] * 5
    assert [record.dealing["makers"] for record in records] == [makers] * 5  # each made some of each episode
    assert books(records[-1]) == {"issued": 20, "learnt": 20, "dropped": 0, "lost": 0, "out": 0, "waiting": 0}


def test_with_staleness_one_makers_work_beside_the_learner_and_between_episodes(tmp_path: Path) -> None:
    settings = config(max_staleness=1, correction="truncated", cluster={"num_makers": 2})
    with dealt_run(settings, tmp_path, chunk_s=0.3, step_s=0.1) as run:
        (first,) = run.run([0])
        time.sleep(2)  # no call of the trainer is under way: makers finish what they may begin
        (second,) = run.run([1])
        rest = run.run(range(2, 5))
        steps, _ = run.finish()
    records = [first, second, *rest]
    assert second.dealing["queue_depth"] == 16  # the whole episode was there already
    assert second.seconds["generate"] + second.seconds["score"] < 0.3
    assert all(record.metrics["staleness_max"] <= 1 for record in records)
    assert any(record.metrics["staleness"] > 0 for record in records)
    assert len(steps) == 30
    assert all(step["importance"] != 1.0 for step in steps[-6:])  # the samples are of another policy
    assert books(records[-1]) == {"issued": 20, "learnt": 20, "dropped": 0, "lost": 0, "out": 0, "waiting": 0}


def test_what_became_too_old_beside_a_slow_trainer_is_dropped_and_made_again(tmp_path: Path) -> None:
    settings = config(
        max_staleness=1, stale_samples="drop", buffer_limit=6, correction="decoupled", cluster={"num_makers": 2}
    )
    with dealt_run(settings, tmp_path, step_s=0.4) as run:
        records = run.run()
    assert all(record.metrics["staleness_max"] <= 1 for record in records)
    final = books(records[-1])
    assert final["dropped"] > 0
    assert final["learnt"] == 20
    assert final["issued"] == sum(number for name, number in final.items() if name != "issued")
    assert max(record.dealing["queue_depth"] for record in records) <= 6 * 8


def test_a_maker_that_dies_costs_the_trainer_nothing(
    reference: tuple[list[dict[str, float]], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    with dealt_run(config(cluster={"num_makers": 2}), tmp_path, chunk_s=0.3) as run:
        run.run([0])
        victim = ray.get(run.makers["maker-0"].ping.remote(), timeout=WAIT_S)
        episode = run.trainer.run_episode.remote(1)
        os.kill(victim, signal.SIGKILL)
        ray.get(episode, timeout=WAIT_S)
        records = run.run([2])
        run.await_revival("maker-0", victim)
        records += run.run([3])
        victim = ray.get(run.makers["maker-1"].ping.remote(), timeout=WAIT_S)
        episode = run.trainer.run_episode.remote(4)
        os.kill(victim, signal.SIGKILL)
        records.append(ray.get(episode, timeout=WAIT_S))
        steps, _ = run.finish()
    assert losses(steps) == losses(reference[0])
    assert records[1].dealing["makers"] == 2  # the one that came back is at work again
    assert records[1].dealing["revivals"] == 1
    assert books(records[-1])["learnt"] == 20

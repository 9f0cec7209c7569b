"""PPO on a real Ray cluster with a store on disk: undisturbed, and with processes killed, to the same bits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ray

from flows.presets import resolve
from infra.errors import StoreError
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import BaseChangedError
from tasks.clusters import end_cluster
from tasks.context import open_context
from tasks.failures import passes
from tasks.ppo import finished_policy, next_episode, ppo_episode, publish_policy
from tasks.ppo_group import TRAINER, trainer_for
from tasks.results import EpisodeResult, Parent
from tests.integration.ppo_runs import TINY_RUN, Run, act_when, kill_when, on_a_cluster
from tests.tiny_llama import write_tiny_llama

pytestmark = pytest.mark.integration

EPISODES = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", initializer_range=0.2)


@pytest.fixture(scope="module")
def config(model: Path) -> PipelineConfig:
    return resolve(
        "llama7b",
        model=str(model),
        episodes=EPISODES,
        overrides=TINY_RUN | {"ppo.max_epochs": 6},  # learning takes long enough to be killed in
    )


@pytest.fixture(scope="module")
def run(config: PipelineConfig, forked: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The run, and its cluster, on which all tests play it."""
    with patch.dict(os.environ, forked), on_a_cluster(config, tmp_path_factory.mktemp("run")) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    return {}


def test_what_is_wrong_inside_an_actor_is_told_in_its_own_sentence(run: Run) -> None:
    ppo = run.plan.config.ppo
    cluster = ppo.cluster.model_copy(update={"num_makers": 1})  # enough for this
    config = run.plan.config.model_copy(update={"ppo": ppo.model_copy(update={"cluster": cluster})})
    broken = run.plan.model_copy(update={"config": config, "actor": Parent(uri="sft/gone@1", digest="0" * 64)})
    with pytest.raises(StoreError, match="sft/gone") as caught:
        ppo_episode.fn(broken, 0)
    assert "\n" not in str(caught.value)
    assert not passes(caught.value)


def test_an_undisturbed_run_commits_every_episode_and_its_policy(run: Run, undisturbed: dict[str, Any]) -> None:
    run.finish()
    assert next_episode(run.plan) == EPISODES
    versions = [manifest.version for manifest in run.store.list("ppo-state", run.plan.name)]
    assert versions == [EPISODES - 1, EPISODES]  # the last two are kept
    numbers = run.numbers()
    assert len(numbers) == EPISODES
    assert numbers[0]["kl"] == 0.0  # before the first update the actor is the initial model
    assert numbers[-1]["kl"] != 0.0
    assert [row["staleness"] for row in numbers] == [0.0] * EPISODES
    undisturbed.update(weights=run.weights(), numbers=numbers)


def test_a_run_whose_processes_were_killed_ends_with_the_same_bits(run: Run, undisturbed: dict[str, Any]) -> None:
    assert undisturbed, "the undisturbed run comes first"
    run.begin()
    trainer = trainer_for(run.plan, 0, open_context())
    # A maker dies while it holds a chunk: another makes that chunk again.
    episode = trainer.run_episode.remote(0)
    run.kill("maker-0")
    first = ray.get(episode, timeout=120)
    ray.get(trainer.await_commit.remote(), timeout=120)
    # The trainer dies in mid-episode: the next attempt restores the last committed state.
    with ThreadPoolExecutor(1) as pool:
        attempt = pool.submit(ppo_episode.fn, run.plan, 1)
        kill_when(attempt, "episode 2: learning")
        with pytest.raises(ray.exceptions.RayActorError):
            attempt.result(timeout=120)
    # Somebody cuts the base's file off: its readers end by a bus error, and the next attempt copies it anew.
    (weights,) = (open_context().settings.models_dir / "bases").glob("*/model.safetensors")
    weights.chmod(0o644)
    with ThreadPoolExecutor(1) as pool:
        attempt = pool.submit(ppo_episode.fn, run.plan, 1)
        act_when(attempt, "episode 2: learning", lambda _: os.truncate(weights, 5000))
        with pytest.raises(BaseChangedError, match="that the models of this run share, was changed or removed") as cut:
            attempt.result(timeout=120)
    assert isinstance(cut.value.__context__, ray.exceptions.RayActorError)  # the trainer itself could not say it
    # An attempt at the committed episode, as after a death between its commit and its answer, finds it done.
    done = ppo_episode.fn(run.plan, 0)
    assert done == EpisodeResult(
        run=run.plan.name,
        episode=0,
        policy_version=first.policy_version,
        incarnation=first.incarnation,
        row=first.as_row(),
    )
    run.finish()
    assert run.numbers() == undisturbed["numbers"]
    assert run.weights() == undisturbed["weights"]


@pytest.mark.clusters
def test_a_run_that_a_nights_budget_ended_goes_on_the_next_night_to_the_same_bits(
    run: Run, undisturbed: dict[str, Any]
) -> None:
    assert undisturbed, "the undisturbed run comes first"
    run.begin()
    ppo_episode.fn(run.plan, 0)
    made = publish_policy.fn(run.plan, 1, is_over=False)  # waits for the commit
    assert (made.metrics["episodes"], made.metrics["planned_episodes"]) == (1, EPISODES)
    assert [manifest.version for manifest in run.store.list("ppo-state", run.plan.name)] == [1]
    end_cluster(run.plan.name)
    assert finished_policy(run.plan, reused=True) is None
    run.finish()
    assert run.numbers() == undisturbed["numbers"]
    assert run.weights() == undisturbed["weights"]
    (first, last) = run.store.list("policy", run.plan.preset)
    assert first.uri == made.uri
    assert (last.metrics["episodes"], "planned_episodes" in last.metrics) == (EPISODES, False)


@pytest.mark.clusters
def test_the_best_episode_is_kept_and_found_again_after_a_kill(run: Run) -> None:
    ppo = run.config.ppo.model_copy(update={"evaluate_every": 1})
    splits = run.config.data.splits.model_copy(update={"development": 8})
    data = run.config.data.model_copy(update={"splits": splits})
    former = run.config
    end_cluster(run.plan.name)
    run.config = run.config.model_copy(update={"ppo": ppo, "data": data})
    try:
        outcomes = []
        for kills in (False, True):
            run.begin()
            for episode in range(EPISODES):
                ppo_episode.fn(run.plan, episode)
                if kills and episode == 1:
                    run.kill(TRAINER)
            publish_policy.fn(run.plan)
            done = finished_policy(run.plan, reused=True)
            assert done is not None
            figures = [row["development"] for row in run.numbers()]
            assert done.metrics["kept_episode"] == 1 + figures.index(max(figures))
            outcomes.append((run.numbers(), run.weights(), done.metrics["kept_episode"]))
            end_cluster(run.plan.name)
        assert outcomes[0] == outcomes[1]
    finally:
        run.config = former

"""PPO on a real Ray cluster with a store on disk: undisturbed, and with processes killed, to the same bits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import ray
import torch

from flows.presets import resolve
from infra.artifacts import ArtifactStore, open_default_store
from infra.clusters import ClusterManifest, leftover_processes
from infra.errors import StoreError
from infra.settings import settings
from rlhf_core.config import PipelineConfig
from rlhf_core.models.loading import load_causal_lm
from rlhf_core.models.reward_model import RewardModel
from tasks.context import open_context
from tasks.data import prepare_data
from tasks.ppo import end_cluster, finished_policy, next_episode, plan_ppo, ppo_episode, publish_policy
from tasks.ppo_group import TRAINER, lease, trainer_for
from tasks.ray_calls import may_pass
from tasks.results import EpisodeResult, Parent, PPORun
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
        overrides={
            "data.splits": {"sft": 8, "preferences": 8, "ppo": 16, "evaluation": 8},
            "ppo.prompts_per_episode": 16,
            "ppo.chunk_size": 4,
            "ppo.train_batch_size": 8,
            "ppo.micro_batch_size": 4,
            "ppo.max_epochs": 6,  # learning takes long enough to be killed in
            "ppo.max_new_tokens": 8,
            "ppo.lr": 1e-3,
            "ppo.reward": {"verifier": 0.0, "reward_model": 1.0},
            # What is carried from episode to episode beside the weights: all of it survives a kill.
            "ppo.critic_init": "reward_model",
            "ppo.kl_target": 0.5,
            "ppo.kl_horizon": 100,
            "ppo.normalise_rewards": True,
            "ppo.ptx_coef": 0.1,
            "ppo.cluster": {"num_makers": 2, "trainer_threads": 1, "maker_threads": 1, "object_store_mb": 128},
        },
    )


def store_random_reward_model(store: ArtifactStore, model: Path) -> str:
    """A tiny random model is never right, but it is scored: there is something to learn from."""
    torch.manual_seed(0)
    scorer = RewardModel.from_causal_lm(load_causal_lm(model, "float32"))
    with TemporaryDirectory() as folder:
        scorer.save_pretrained(Path(folder))
        return store.commit("reward-model", "random", Path(folder)).uri


class Run:
    """One PPO run in a home and a store of its own, driven as the flow drives it."""

    def __init__(self, config: PipelineConfig, directory: Path) -> None:
        self.config, self.directory = config, directory
        self.store: ArtifactStore
        self.plan: PPORun
        self.begin()

    def begin(self) -> None:
        """Plan the run in an empty store; nothing of an earlier attempt is there to go on from."""
        rmtree(self.directory / "store", ignore_errors=True)
        (self.directory / "store").mkdir()
        self.store = open_default_store()
        dataset = prepare_data.fn(self.config, None, reads=("ppo",))
        scorer = store_random_reward_model(self.store, Path(self.config.model.path))
        self.plan = plan_ppo.fn(self.config, "model/base", scorer, dataset.parent)

    def finish(self) -> None:
        for episode in range(next_episode(self.plan), EPISODES):
            ppo_episode.fn(self.plan, episode)
        publish_policy.fn(self.plan)

    def kill(self, name: str) -> None:
        os.kill(ray.get(ray.get_actor(name).ping.remote(), timeout=30), signal.SIGKILL)

    def weights(self) -> dict[str, str]:
        done = finished_policy(self.plan, reused=True)
        assert done is not None
        files = self.store.resolve(done.uri).files
        return {entry.path: entry.sha256 for entry in files if entry.path.endswith(".safetensors")}

    def numbers(self) -> list[dict[str, float]]:
        """Every episode's figures but for its times."""
        state = self.store.read_json(self.store.resolve(f"ppo-state/{self.plan.name}"), "state.json")
        return [record["metrics"] for record in state["history"]]


@pytest.fixture(scope="module")
def run(config: PipelineConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The run, and its cluster, on which all tests play it; at the end nothing of the cluster is left."""
    directory = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHF_HOME", str(directory / "home"))
        patch.setenv("RLHF_STORE_URL", f"file://{directory}/store")
        assert settings().home == directory / "home"
        made = Run(config, directory)
        manifest: ClusterManifest | None = None
        try:
            manifest = lease(made.plan, open_context())
            yield made
        finally:
            end_cluster(made.plan)
        assert manifest is not None
        assert leftover_processes(manifest.mark) == []


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    return {}


def test_what_is_wrong_inside_an_actor_is_told_in_its_own_sentence(run: Run) -> None:
    config = deepcopy(run.plan.config)
    config["ppo"]["cluster"]["num_makers"] = 1  # enough for this
    broken = run.plan.model_copy(update={"config": config, "actor": Parent(uri="sft/gone@1", digest="0" * 64)})
    with pytest.raises(StoreError, match="sft/gone") as caught:
        ppo_episode.fn(broken, 0)
    assert "\n" not in str(caught.value)
    assert not may_pass(caught.value)


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
        _kill_when_learning(attempt)
        with pytest.raises(ray.exceptions.RayActorError):
            attempt.result(timeout=120)
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


def _kill_when_learning(attempt: Future[Any]) -> None:
    """Kill the trainer while it learns from its second episode.

    The group that lost a maker is ended and built anew first, so for a time the name has no answer.
    """
    deadline = time.monotonic() + 120
    while not attempt.done():
        assert time.monotonic() < deadline, "waited 120 s for the trainer to learn"
        try:
            trainer = ray.get_actor(TRAINER)
            if ray.get(trainer.progress.remote(), timeout=120).startswith("episode 2: learning"):
                os.kill(ray.get(trainer.ping.remote(), timeout=30), signal.SIGKILL)
                return
        except (ValueError, ray.exceptions.RayActorError):
            pass
        time.sleep(0.02)  # whoever only asks takes a core from those who build it
    raise AssertionError("the episode was over before its trainer could be killed") from attempt.exception()

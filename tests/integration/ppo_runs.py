"""PPO runs on a real Ray cluster, driven as the flow drives them, in a home and a store of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import ray
import torch

from infra.artifacts import ArtifactStore, open_default_store
from infra.clusters import ClusterRecord, leftover_processes
from infra.settings import settings
from rlhf_core.config import PipelineConfig
from rlhf_core.models.loading import load_causal_lm
from rlhf_core.models.reward_model import RewardModel
from tasks.clusters import end_cluster
from tasks.context import open_context
from tasks.data import prepare_data
from tasks.export import export
from tasks.ppo import finished_policy, next_episode, plan_ppo, ppo_episode, publish_policy
from tasks.ppo_group import TRAINER, lease
from tasks.results import Parent, PPORun

TINY_RUN: dict[str, Any] = {
    "data.splits": {"sft": 8, "preferences": 8, "ppo": 16, "evaluation": 8},
    "ppo.prompts_per_episode": 16,
    "ppo.chunk_size": 4,
    "ppo.train_batch_size": 8,
    "ppo.micro_batch_size": 4,
    "ppo.max_epochs": 2,
    "ppo.max_new_tokens": 8,
    "ppo.lr": 1e-3,
    "ppo.reward": {"verifier": 0.0, "reward_model": 1.0},
    # What is carried from episode to episode beside the weights: all of it survives a kill.
    "ppo.critic_init": "reward_model",
    "ppo.kl_target": 0.5,
    "ppo.kl_horizon": 100,
    "ppo.normalise_rewards": True,
    "ppo.ptx_coef": 0.1,
    "ppo.cluster.num_makers": 2,
    "ppo.cluster.trainer_threads": 1,
    "ppo.cluster.maker_threads": 1,
    "ppo.cluster.object_store_mb": 128,
}
"""Overrides for episodes of a second of a tiny Llama."""


def store_random_reward_model(store: ArtifactStore, model: Path) -> str:
    """A tiny random model is never right, but it is scored: there is something to learn from."""
    torch.manual_seed(0)
    scorer = RewardModel.from_causal_lm(load_causal_lm(model, "float32"))
    with TemporaryDirectory() as folder:
        scorer.save_pretrained(Path(folder))
        return store.commit("reward-model", "random", Path(folder)).uri


class Run:
    """One PPO run."""

    def __init__(self, config: PipelineConfig, directory: Path, rows: Path | None = None) -> None:
        self.config, self.directory = config, directory
        self.rows = rows
        """Files of a dataset; None: the configuration's data are prepared."""
        self.store: ArtifactStore
        self.plan: PPORun
        self.begin()

    def begin(self) -> None:
        """Plan the run in an empty store; nothing of an earlier attempt is there to go on from."""
        rmtree(self.directory / "store", ignore_errors=True)
        (self.directory / "store").mkdir()
        self.store = open_default_store()
        if self.rows is None:
            dataset = prepare_data.fn(self.config, None, reads=("ppo",)).parent
        else:
            stored = self.store.commit("dataset", "stored", self.rows)
            dataset = Parent(uri=stored.uri, digest=stored.digest)
        scorer = store_random_reward_model(self.store, Path(self.config.model.path))
        self.plan = plan_ppo.fn(self.config, "model/base", scorer, dataset)

    def finish(self) -> None:
        for episode in range(next_episode(self.plan), self.config.ppo.episodes):
            ppo_episode.fn(self.plan, episode)
        publish_policy.fn(self.plan)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(ray.get(ray.get_actor(name).ping.remote(), timeout=30), number)

    def weights(self) -> dict[str, str]:
        return {path: entry.sha256 for path, entry in self._policy().items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The policy's weights as a whole model's, in whichever form it is stored."""
        done = finished_policy(self.plan, reused=True)
        assert done is not None
        manifest = self.store.resolve(done.uri)
        with TemporaryDirectory() as folder:
            if manifest.has_adapters:
                export(self.store, settings(), manifest, Path(folder), merged=True)
            else:
                self.store.fetch(manifest.ref, Path(folder))
            return dict(load_causal_lm(Path(folder), "float32").named_parameters())

    def numbers(self) -> list[dict[str, float]]:
        """Every episode's figures but for its times."""
        state = self.store.read_json(self.store.resolve(f"ppo-state/{self.plan.name}"), "state.json")
        return [record["metrics"] for record in state["history"]]

    def _policy(self) -> dict[str, Any]:
        done = finished_policy(self.plan, reused=True)
        assert done is not None
        return {
            entry.path: entry for entry in self.store.resolve(done.uri).files if entry.path.endswith(".safetensors")
        }


@contextmanager
def on_a_cluster(config: PipelineConfig, directory: Path, rows: Path | None = None) -> Iterator[Run]:
    """The run, and its cluster; at the end nothing of the cluster is left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHF_HOME", str(directory / "home"))
        patch.setenv("RLHF_STORE_URL", f"file://{directory}/store")
        assert settings().home == directory / "home"
        made = Run(config, directory, rows)
        record: ClusterRecord | None = None
        try:
            record = lease(made.plan, open_context())
            yield made
        finally:
            end_cluster(made.plan.name)
        assert record is not None
        assert leftover_processes(record.mark) == []


def kill_when(attempt: Future[Any], doing: str, victim: str = TRAINER, number: int = signal.SIGKILL) -> None:
    """Kill an actor while the trainer says that it is doing something, such as `episode 2: learning`."""
    act_when(attempt, doing, lambda pid: os.kill(pid, number), victim)


def act_when(attempt: Future[Any], doing: str, act: Callable[[int], None], actor: str = TRAINER) -> None:
    """Call a function with the process of an actor while the trainer says that it is doing something.

    The group that lost a process is ended and built anew first, so for a time the name has no answer.
    """
    deadline = time.monotonic() + 120
    while not attempt.done():
        assert time.monotonic() < deadline, f"waited 120 s for {doing!r}"
        try:
            trainer = ray.get_actor(TRAINER)
            pid = ray.get(ray.get_actor(actor).ping.remote(), timeout=120)
            if ray.get(trainer.progress.remote(), timeout=120).startswith(doing):
                act(pid)
                return
        except (ValueError, ray.exceptions.RayActorError):
            pass
        time.sleep(0.01)  # whoever only asks takes a core from those who build it
    raise AssertionError("the episode was over before the process could be killed") from attempt.exception()

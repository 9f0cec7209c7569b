"""Tiny models for actors of coati's detached classes, and the cluster that they run on."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from infra.clusters import connect, disconnect, lease_cluster, release_cluster
from rlhf_core.coati.callbacks import MakerCallback, TrainerCallback
from rlhf_core.coati.detached.holder import ExperienceMakerHolder
from rlhf_core.coati.strategy import Strategy, make_strategy
from rlhf_core.config import LoRAConfig, PPOOptions
from rlhf_core.models.critic import Critic
from rlhf_core.models.lora import attach_lora
from rlhf_core.strategy.parts import Parts
from rlhf_core.types import Experience
from tests.tiny_llama import tiny_llama, tiny_tokenizer
from tests.unit.coati.ppo_trainers import encoded, padded, reward_model

OPTIONS = PPOOptions(lam=0.95, dtype="float32", rollout_dtype="float32")
LIMIT_S = 400.0
DRAWING: dict[str, Any] = {"max_new_tokens": 4, "top_k": 20}
TEXTS = [f"{number} plus {number * 3}" for number in range(6)] + ["0 plus 0", "1 plus 3"]  # two prompts come again


@contextmanager
def cluster(directory: Path, name: str = "classes") -> Iterator[None]:
    """Run the block as a driver of a cluster of logical GPUs."""
    record = lease_cluster(
        name, directory=directory, num_cpus=8, num_gpus=4, object_store_mb=128,
        environment={
            "RAY_memory_monitor_refresh_ms": "0",  # it ends actors here when others fill the machine
            "PYTHONPATH": str(Path(__file__).parents[2]),  # wherever the cluster is started
        },
    )  # fmt: skip
    try:
        connect(record)
        yield
    finally:
        try:
            disconnect()
        finally:
            release_cluster(name)


def plain() -> Strategy:
    return make_strategy("plain", device="cpu")


def in_parts() -> Strategy:
    return make_strategy("3d", device="cpu", parts=Parts(tp=2))


def in_stages() -> Strategy:
    return make_strategy("3d", device="cpu", parts=Parts(pp=2))


def actor() -> LlamaForCausalLM:
    return tiny_llama(initializer_range=0.2)


def trained(lora: bool = False) -> tuple[Any, Any]:
    """Return actor and critic, as trainer and makers build them."""
    made = actor()
    critic = Critic.from_causal_lm(made)
    if lora:
        attach_lora(made, LoRAConfig(r=2), seed=1)
        attach_lora(critic.trunk, LoRAConfig(r=2), seed=2)
    return made, critic


def all_four(lora: bool = False) -> tuple[Any, Any, Any, Any]:
    made, critic = trained(lora)
    return made, critic, reward_model(), None if lora else actor()


def batches(texts: list[str] = TEXTS, size: int = 2) -> list[dict[str, Any]]:
    return [padded(encoded(texts[start : start + size])) for start in range(0, len(texts), size)]


def maker(name: str, trainers: list[str], *, max_restarts: int = 0, **changes: Any) -> Any:
    """Return the handle of a maker with tiny models."""
    parameters: dict[str, Any] = {
        "strategy_fn": plain, "model_fn": all_four, "options": OPTIONS, "tokenizer": tiny_tokenizer(), "seed": 3,
        "kl_coef": 0.1, "start_timeout_s": 300.0, **DRAWING,
    }  # fmt: skip
    holder = ExperienceMakerHolder.options(name=name, num_cpus=0, max_restarts=max_restarts)
    return holder.remote(trainers, **(parameters | changes))


class Notes(TrainerCallback):
    """Writes the metrics of every step to a file, a line of JSON each."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(metrics | {"rows": len(experience)}) + "\n")


class MakerNotes(MakerCallback):
    """Writes one letter for each batch that a maker has sent; with the last of some it ends its process."""

    def __init__(self, path: Path, dies_after: int = 0) -> None:
        self._path, self._dies_after = path, dies_after

    def on_send_end(self) -> None:
        with self._path.open("a") as file:
            file.write("x")
        if len(self._path.read_text()) == self._dies_after:
            os.kill(os.getpid(), signal.SIGKILL)


class Dies(TrainerCallback):
    """Ends the trainer's process at the end of an episode."""

    def __init__(self, episode: int) -> None:
        self._episode = episode

    def on_episode_end(self, episode: int) -> None:
        if episode == self._episode:
            os.kill(os.getpid(), signal.SIGKILL)


def notes(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(trainers: list[Any], makers: list[Any], dataloader_fn: Callable[[], Any], steps: list[int], *fit: int) -> None:
    """Let trainers fit and makers work, side by side; wait until all have returned, or have died."""
    loops = [each.workingloop.remote(dataloader_fn, num_steps=count) for each, count in zip(makers, steps, strict=True)]
    fits = [trainer.fit.remote(*fit) for trainer in trainers]
    pending, deadline = [*fits, *loops], time.monotonic() + LIMIT_S
    while pending:
        ready, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"{len(pending)} fits and loops did not end within {LIMIT_S:.0f} s")
        with suppress(*([] if ready[0] in fits else [RayActorError])):
            ray.get(ready[0])


def wait_until_free(name: str) -> None:
    """Wait until an actor of a name that died has given it up."""
    deadline = time.monotonic() + LIMIT_S
    with suppress(ValueError):
        while time.monotonic() < deadline:
            ray.get_actor(name)
            time.sleep(0.2)


def end(*actors: Any) -> None:
    for each in actors:
        ray.kill(each)


def weights_in(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path)

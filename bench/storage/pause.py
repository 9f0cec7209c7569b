"""How long the learner stands still for a training state, against a plain copy of as many bytes."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from flows.presets import resolve
from infra.settings import settings
from rlhf_core.config import LoRAConfig
from rlhf_core.models.critic import Critic
from rlhf_core.models.loading import load_causal_lm, locate_model
from rlhf_core.models.lora import attach_lora
from rlhf_core.ppo.learner import PPOLearner

BLOCK_BYTES = 64 << 20
ROUNDS = 5


def measure() -> dict[str, Any]:
    """Return the pause of a learner of adapters and of one of all weights of the quickstart's model."""
    directory = locate_model("smollm2-135m-instruct", models_dir=settings().models_dir)
    return {
        "adapters": _pause(directory, resolve("quickstart").ppo.lora),
        "all_weights": _pause(directory, None),
    }


def _pause(directory: Path, lora: LoRAConfig | None) -> dict[str, Any]:
    learner = _learner(directory, lora)
    size = sum(tensor.numel() * tensor.element_size() for tensor in learner.state().tensors.values())
    block = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
    pauses, copies = [], []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        state = learner.state()
        pauses.append(time.perf_counter() - started)
        del state
        started = time.perf_counter()
        kept = [block[: min(BLOCK_BYTES, size - start)].copy() for start in range(0, size, BLOCK_BYTES)]
        copies.append(time.perf_counter() - started)
        del kept
    ratios = [pause / copy for pause, copy in zip(pauses, copies, strict=True)]
    return {
        "state_mb": round(size / 1e6),
        "pause_ms": round(1e3 * median(pauses)),
        "plain_copy_ms": round(1e3 * median(copies)),
        "ratio": round(median(ratios), 2),
    }


def _learner(directory: Path, lora: LoRAConfig | None) -> PPOLearner:
    """Return a learner whose optimizer has its moments, as after a step."""
    config = resolve("quickstart").ppo.model_copy(update={"lora": lora})
    actor = load_causal_lm(directory, "float32")
    critic = Critic.from_causal_lm(actor)
    if lora is not None:
        attach_lora(actor, lora, seed=0)
        attach_lora(critic.trunk, lora, seed=0)
    learner = PPOLearner.build(actor, critic, config, device="cpu")
    for trained in learner._roles.values():
        for parameter in trained.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, 1e-6)
        trained.optimizer.step()
        trained.optimizer.zero_grad(set_to_none=True)
    return learner

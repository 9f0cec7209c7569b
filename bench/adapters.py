"""One PPO optimizer step with adapters against all weights, same batch, same run; one JSON line.

python bench/adapters.py
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from flows.presets import resolve
from infra.settings import settings
from rlhf_core.config import LoRAConfig
from rlhf_core.models.critic import Critic
from rlhf_core.models.loading import load_causal_lm, locate_model
from rlhf_core.models.lora import attach_lora
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.types import Experience

ROWS, PROMPT, RESPONSE, STEPS = 32, 21, 15, 3


def experience() -> Experience:
    """Return a minibatch of the quickstart's shape, of random tokens."""
    draw = torch.Generator().manual_seed(0)

    def numbers() -> torch.Tensor:
        return torch.randn(ROWS, RESPONSE, generator=draw)

    return Experience(
        sequences=torch.randint(10, 40_000, (ROWS, PROMPT + RESPONSE), generator=draw),
        action_log_probs=numbers(),
        values=numbers(),
        reward=numbers(),
        kl=numbers(),
        advantages=numbers(),
        attention_mask=torch.ones(ROWS, PROMPT + RESPONSE, dtype=torch.bool),
        action_mask=torch.ones(ROWS, RESPONSE, dtype=torch.bool),
        policy_version=torch.zeros(ROWS, dtype=torch.long),
        rollout_log_probs=numbers(),
        returns=numbers(),
    )


def measure(directory: Path, lora: LoRAConfig | None) -> dict[str, float]:
    """Return seconds of a step (the fastest of several) and bytes of the committed state."""
    config = resolve("quickstart").ppo.model_copy(update={"lora": lora})
    actor = load_causal_lm(directory, "float32")
    critic = Critic.from_causal_lm(actor)
    if lora is not None:
        attach_lora(actor, lora, seed=0)
        attach_lora(critic.trunk, lora, seed=0)
    learner = PPOLearner.build(actor, critic, config, device="cpu")
    batch = learner.recompute(experience())
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        learner.training_step(batch)
        times.append(time.perf_counter() - started)
    size = sum(tensor.numel() * tensor.element_size() for tensor in learner.state().tensors.values())
    return {"step_s": round(min(times), 2), "state_mb": round(size / 1e6)}


def main() -> int:
    """Measure both and print the line."""
    directory = locate_model("smollm2-135m-instruct", models_dir=settings().models_dir)
    adapters = measure(directory, resolve("quickstart").ppo.lora)
    everything = measure(directory, None)
    line = {
        "bench": "adapters",
        "threads": torch.get_num_threads(),
        "adapters": adapters,
        "all_weights": everything,
        "step_ratio": round(adapters["step_s"] / everything["step_s"], 2),
        "state_ratio": round(adapters["state_mb"] / everything["state_mb"], 3),
    }
    sys.stdout.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

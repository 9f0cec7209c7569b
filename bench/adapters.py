"""One PPO optimizer step with adapters against all weights, same batch, same run; one JSON line.

python bench/adapters.py
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.speed.learning import PROMPT, RESPONSE, experience
from flows.presets import resolve
from infra.settings import settings
from rlhf_core.config import LoRAConfig
from rlhf_core.models.critic import Critic
from rlhf_core.models.loading import load_causal_lm, locate_model
from rlhf_core.models.lora import attach_lora
from rlhf_core.ppo.learner import PPOLearner

ROWS, STEPS = 32, 3


def measure(directory: Path, lora: LoRAConfig | None) -> dict[str, float]:
    """Return seconds of a step (the fastest of several) and bytes of the committed state."""
    config = resolve("quickstart").ppo.model_copy(update={"lora": lora})
    actor = load_causal_lm(directory, "float32")
    critic = Critic.from_causal_lm(actor)
    if lora is not None:
        attach_lora(actor, lora, seed=0)
        attach_lora(critic.trunk, lora, seed=0)
    learner = PPOLearner.build(actor, critic, config, device="cpu")
    batch = learner.recompute(experience(ROWS, PROMPT, RESPONSE, vocabulary=actor.config.vocab_size))
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

"""TRL's PPOTrainer on the problem: `python trl_side.py START SEED`, with trl 1.12 on PYTHONPATH; prints one line."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import problem
import settings
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)
from transformers.modeling_outputs import BaseModelOutput
from trl.experimental.ppo import PPOConfig, PPOTrainer


class TokensAsStates(nn.Module):
    """A backbone whose hidden state is the token itself, so that a reward model can read what was said."""

    def forward(self, input_ids: Tensor, **_: Any) -> BaseModelOutput:
        """Return the ids as states of width 1."""
        return BaseModelOutput(hidden_states=(input_ids[..., None].float(),))


class Verifier(nn.Module):
    """The verifier in the shape of a reward model: the same score at every place of a row."""

    base_model_prefix = "tokens"

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.tokens = TokensAsStates()
        self._scores = scores

    def score(self, states: Tensor) -> Tensor:
        """Return [B S 1], and keep the mean of the batch for the curve."""
        rows = states[..., 0].long().tolist()
        width = problem.DIGITS + 1
        found = [problem.score(row[:width], _response(row[width:])) for row in rows]
        self._scores += found
        return torch.tensor(found)[:, None, None].expand(*states.shape[:2], 1)


def _response(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(problem.EOS) + 1] if problem.EOS in tokens else tokens


def main(start: str, seed: int) -> None:
    """Train, and print scores of every update and the held-out score at the end."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    words = problem.tokenizer()
    words.padding_side = "left"
    policy, reference = (AutoModelForCausalLM.from_pretrained(start) for _ in range(2))
    value = AutoModelForSequenceClassification.from_pretrained(start, num_labels=1)
    nn.init.zeros_(value.score.weight)
    texts = problem.prompts(seed + 1, settings.UPDATES * settings.SAMPLES)
    data = Dataset.from_dict({"input_ids": [words(text, add_special_tokens=False).input_ids for text in texts]})
    scores: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        config = PPOConfig(
            output_dir=directory, seed=seed, use_cpu=True, bf16=False, report_to="none", logging_steps=10_000,
            save_strategy="no", num_sample_generations=0, disable_tqdm=True, gradient_checkpointing=False,
            per_device_train_batch_size=settings.SAMPLES, gradient_accumulation_steps=1,
            num_mini_batches=settings.SAMPLES // settings.MINI_BATCH, total_episodes=len(texts),
            local_rollout_forward_batch_size=settings.SAMPLES, response_length=problem.DIGITS + 1,
            stop_token="eos", temperature=settings.TEMPERATURE, missing_eos_penalty=None,
            num_ppo_epochs=settings.EPOCHS, whiten_rewards=False, kl_coef=settings.KL_COEF, kl_estimator="k1",
            cliprange=settings.CLIP, vf_coef=settings.VF_COEF, cliprange_value=settings.VALUE_CLIP,
            gamma=settings.GAMMA, lam=settings.LAM, learning_rate=settings.LR,
        )  # fmt: skip
        parameters = [*policy.parameters(), *value.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=settings.LR, betas=settings.BETAS, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        trainer = PPOTrainer(
            args=config, processing_class=words, model=policy, ref_model=reference, reward_model=Verifier(scores),
            train_dataset=data, eval_dataset=data.select(range(settings.SAMPLES)), value_model=value,
            optimizers=(optimizer, schedule),
        )  # fmt: skip
        scores.clear()
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
    size = settings.SAMPLES
    curve = [sum(scores[at : at + size]) / size for at in range(0, settings.UPDATES * size, size)]
    held_out = problem.sampled_score(policy, settings.HELD_OUT_SEED)
    line = {"curve": curve, "held_out": held_out, "seconds": round(seconds, 1)}
    sys.stdout.write("RESULT " + json.dumps(line) + "\n")


if __name__ == "__main__":
    main(str(Path(sys.argv[1])), int(sys.argv[2]))

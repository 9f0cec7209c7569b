"""Our PPOTrainer on the problem: `python our_side.py START SEED`; prints one JSON line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import problem
import settings
import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM

from rlhf_core import Callback, Critic, Experience, PlainBooster, PPOTrainer, RLVRRewardModel
from rlhf_core.config import PPOOptions


class Prompts:
    """Batches of prompts, as a loader gives them."""

    def __init__(self, texts: list[str]) -> None:
        words = problem.tokenizer()
        self._ids = torch.tensor([words(text, add_special_tokens=False).input_ids for text in texts])

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._ids) // settings.SAMPLES

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield them in order."""
        for ids in self._ids.split(settings.SAMPLES):
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def verifier(input_ids: Tensor, attention_mask: Tensor, **where: Any) -> Tensor:  # noqa: ARG001  (coati's call)
    """Return 1 for the digits backwards, else 0."""
    begin, end = where["response_start"], where["response_end"]
    row = input_ids.tolist()
    return torch.tensor(problem.score(row[begin - problem.DIGITS - 1 : begin], row[begin : end + 1]))


class Scores(Callback):
    """Keeps every score."""

    def __init__(self) -> None:
        self.curve: list[float] = []

    def on_make_experience_end(self, experience: Experience) -> None:
        """Take the share of right answers from the rewards: what a row's reward and penalty sum to."""
        scores = (experience.reward + settings.KL_COEF * experience.kl).sum(1)
        self.curve.append(scores.mean().item())


def main(start: str, seed: int) -> None:
    """Train, and print scores of every update and the held-out score at the end."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    actor, reference = (AutoModelForCausalLM.from_pretrained(start) for _ in range(2))
    critic = Critic.from_causal_lm(actor)
    trained: dict[str, Any] = {}
    for role, model in (("actor", actor), ("critic", critic)):
        optimizer = AdamW(model.parameters(), lr=settings.LR, betas=settings.BETAS, weight_decay=0.0)
        booster = PlainBooster(precision="fp32", max_norm=float("inf"))  # TRL's loop does not clip
        schedule = LambdaLR(optimizer, lambda _: 1.0)
        boosted = booster.boost(model=model, optimizer=optimizer, lr_scheduler=schedule)
        names = (role, f"{role}_optim", f"{role}_lr_scheduler")
        trained |= {f"{role}_booster": booster, **dict(zip(names, (boosted[0], boosted[1], boosted[4]), strict=True))}
    scores = Scores()
    trainer = PPOTrainer(
        **trained, reward_model=RLVRRewardModel([verifier]), initial_model=reference, tokenizer=problem.tokenizer(),
        kl_coef=settings.KL_COEF, ptx_coef=0.0, train_batch_size=settings.MINI_BATCH, eps_clip=settings.CLIP,
        value_clip=settings.VALUE_CLIP, vf_coef=settings.VF_COEF, callbacks=[scores], seed=seed,
        options=PPOOptions(gamma=settings.GAMMA, lam=settings.LAM, dtype="float32", rollout_dtype="float32"),
        max_new_tokens=problem.DIGITS + 1, temperature=settings.TEMPERATURE,
    )  # fmt: skip
    texts = problem.prompts(seed + 1, settings.UPDATES * settings.SAMPLES)
    started = time.perf_counter()
    trainer.fit(
        num_episodes=settings.UPDATES, num_collect_steps=1, num_update_steps=settings.EPOCHS,
        prompt_dataloader=Prompts(texts),
    )  # fmt: skip
    seconds = time.perf_counter() - started
    held_out = problem.sampled_score(actor, settings.HELD_OUT_SEED)
    line = {"curve": scores.curve, "held_out": held_out, "seconds": round(seconds, 1)}
    sys.stdout.write("RESULT " + json.dumps(line) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

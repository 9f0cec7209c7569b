"""Runs of five optimizer steps that end after the third, and a process that runs them all and dies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from rlhf_core.coati.callbacks import Callback
from rlhf_core.coati.ppo_trainer import PPOTrainer
from rlhf_core.config import LoRAConfig, PPOOptions
from tests.unit.coati import ppo_trainers
from tests.unit.coati.ppo_trainers import demonstrations, prompts

ENDS_AFTER = 3


class Case(NamedTuple):
    """One run: how it is built, and the three numbers of `fit`."""

    trainer: dict[str, Any]
    fit: tuple[int, int, int]
    ptx: bool = False


ADAPTIVE = PPOOptions(
    lam=0.95, dtype="float32", rollout_dtype="float32", kl_target=0.5, kl_horizon=20, normalise_rewards=True,
    critic_init="reward_model",
)  # fmt: skip

CASES = {
    "between episodes, all weights, demonstrations": Case({"ptx_coef": 0.3}, (5, 1, 1), ptx=True),
    "in an episode, dropout in adapters, random batches": Case(
        {"lora": LoRAConfig(r=2, dropout=0.3), "sample_buffer": True, "accumulation_steps": 2}, (1, 3, 10)
    ),
    "in the second episode, adaptive control, a rescaled critic": Case(
        {"lora": LoRAConfig(r=2), "options": ADAPTIVE}, (2, 3, 1)
    ),
}


class Ended(Exception):  # noqa: N818
    """Stands for the end of the process."""


class EndAfterThird(Callback):
    """Ends the run before the fourth optimizer step."""

    def __init__(self) -> None:
        self.steps = 0

    def on_learn_batch_start(self) -> None:
        if self.steps == ENDS_AFTER:
            raise Ended
        self.steps += 1


def build(name: str, **changes: Any) -> PPOTrainer:
    torch.manual_seed(11)
    return ppo_trainers.trainer(**(CASES[name].trainer | changes))


def fit(ours: PPOTrainer, name: str, log_dir: Path) -> None:
    case = CASES[name]
    ours.fit(*case.fit, prompts(8), demonstrations() if case.ptx else None, log_dir=log_dir)


def directory(root: Path, name: str) -> Path:
    return root / str(list(CASES).index(name))


def leave_checkpoints(root: Path) -> NoReturn:
    """Write checkpoints of all cases, and end without a word."""
    for each in CASES:
        kept = directory(root, each)
        started = build(each, save_dir=kept / "saved", save_interval=ENDS_AFTER, callbacks=(EndAfterThird(),))
        try:
            fit(started, each, kept / "first")
        except Ended:
            continue
    os._exit(9)

"""SFT, reward model and PPO under any strategy: five steps on this rank's share of the data; alone, on all of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.config import LoRAConfig, PPOConfig, RewardModelConfig, SFTConfig
from rlhf_core.data.encoding import EncodedPair
from rlhf_core.models.critic import Critic
from rlhf_core.models.lora import attach_lora
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.ppo.episode import learn_episode
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.strategy.parts import Parts
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.supervised import reward_model as reward_model_module
from rlhf_core.supervised import sft as sft_module
from rlhf_core.supervised import step as step_module
from rlhf_core.training.optim import Trained
from rlhf_core.types import Experience
from tests.parallel.ranks import Found
from tests.tiny_llama import tiny_llama

DEVICE = os.environ.get("CASES_DEVICE", "cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STEPS, ROWS, LAST = 5, 12, 8
"""Optimizer steps, rows of a step on all ranks, and of the last one: three ranks have 3, 3 and 2 of them."""
SEED = 3
LR, OTHER_LR = 1e-4, 1e-3
DECAY, CLIP = 0.1, 0.5
LORA = LoRAConfig(r=4, alpha=8.0)


def demonstrations() -> list[tuple[list[int], list[int]]]:
    """Prompts and responses of different lengths."""
    draw = torch.Generator().manual_seed(1)

    def tokens(least: int, most: int) -> list[int]:
        length = int(torch.randint(least, most + 1, (1,), generator=draw))
        return torch.randint(3, 250, (length,), generator=draw).tolist()

    return [(tokens(1, 6), tokens(2, 9)) for _ in range(ROWS * (STEPS - 1) + LAST)]


def pairs() -> list[EncodedPair]:
    """Two responses to each prompt, with margins."""
    rows = demonstrations()
    others = [response for _, response in rows[1:] + rows[:1]]
    return [
        EncodedPair([*prompt, *chosen], [*prompt, *rejected], margin=0.1 * (number % 3))
        for number, ((prompt, chosen), rejected) in enumerate(zip(rows, others, strict=True))
    ]


def experience() -> Experience:
    """Five minibatches of samples, their numbers drawn at random.

    Short responses have the larger advantages: a mean over sequences of whitened ones is then far from zero.
    """
    rows = (demonstrations() * 2)[: ROWS * STEPS]
    left, right = (max(len(row[side]) for row in rows) for side in (0, 1))
    ids = [[0] * (left - len(p)) + p + r + [0] * (right - len(r)) for p, r in rows]
    seen = [[False] * (left - len(p)) + [True] * (len(p) + len(r)) + [False] * (right - len(r)) for p, r in rows]
    attention_mask = torch.tensor(seen)
    mask = attention_mask[:, left:]
    draw = torch.Generator().manual_seed(23)  # no ratio comes as near to where it is clipped as bfloat16's roundings

    def table(scale: float = 1.0) -> Tensor:
        return torch.where(mask, torch.randn(mask.shape, generator=draw) * scale, 0.0)

    by_length = torch.where(mask, 4.0 - mask.sum(dim=1, keepdim=True), 0.0)
    return Experience(
        sequences=torch.tensor(ids),
        action_log_probs=table() - 5.5,
        values=table(0.1),
        reward=table(),
        kl=table(),
        advantages=table() + by_length,
        attention_mask=attention_mask,
        action_mask=mask,
        policy_version=torch.zeros(len(rows), dtype=torch.long),
        rollout_log_probs=table() - 5.5,
        returns=table(),
    )


def language_model(ranks: Ranks) -> nn.Module:
    """Every rank begins elsewhere: the booster makes them equal."""
    return tiny_llama(initializer_range=0.2, seed=ranks.rank).to(DEVICE)


def scoring_model(ranks: Ranks) -> RewardModel:
    model = RewardModel.from_causal_lm(tiny_llama(initializer_range=0.2, seed=ranks.rank))
    nn.init.normal_(model.head.weight, std=0.1, generator=torch.Generator().manual_seed(ranks.rank))
    return model.to(DEVICE)


def trainers(ranks: Ranks, strategy: str) -> dict[str, Any]:
    """Return the options of trainers."""
    name, parts = named(strategy)
    return {"strategy": name, "num_trainers": ranks.everyone.world_size, **parts._asdict()}


def named(strategy: str) -> tuple[str, Parts]:
    """Return what a strategy's name stands for: `3d-tp2-pp2` cuts matrices into two parts, and layers into stages.

    `3d-sp2` cuts rows by heads, `3d-tp2-sg2` by split_gather.
    """
    name, *sizes = strategy.split("-")
    found = {size[:2]: int(size[2:]) for size in sizes}
    gathered = found.pop("sg", None)
    mode: dict[str, Any] = {} if gathered is None else {"sp": gathered, "sp_mode": "split_gather"}
    return name, Parts(**found, **mode)


def share(ranks: Ranks, strategy: str) -> int:
    """Return how many rows of a step each model learns from."""
    return ROWS * named(strategy)[1].number // ranks.everyone.world_size


def sft_config(ranks: Ranks, strategy: str, precision: str, **changes: Any) -> SFTConfig:
    options: dict[str, Any] = {
        **trainers(ranks, strategy), "batch_size": share(ranks, strategy),
        "micro_batch_size": 2, "lr": LR, "warmup_steps": 2, "weight_decay": DECAY, "grad_clip": CLIP, "max_length": 16,
        "dtype": {"fp32": "float32", "bf16": "bfloat16"}[precision],
    }  # fmt: skip
    return SFTConfig(**(options | changes))


def reward_model_config(ranks: Ranks, strategy: str, precision: str) -> RewardModelConfig:
    return RewardModelConfig(
        **trainers(ranks, strategy), batch_size=share(ranks, strategy), micro_batch_size=2,
        lr=LR, head_lr=OTHER_LR, warmup_steps=2, weight_decay=DECAY, grad_clip=CLIP, max_length=16, centring=0.1,
        dtype={"fp32": "float32", "bf16": "bfloat16"}[precision],
    )  # type: ignore[arg-type]  # fmt: skip


def ppo_config(ranks: Ranks, strategy: str, precision: str, **changes: Any) -> PPOConfig:
    options: dict[str, Any] = {
        **trainers(ranks, strategy), "train_batch_size": share(ranks, strategy),
        "micro_batch_size": 2, "prompts_per_episode": ROWS * STEPS, "chunk_size": ROWS, "lr": LR,
        "critic_lr": OTHER_LR, "warmup_steps": 2, "weight_decay": DECAY, "grad_clip": CLIP, "lora": None,
        "aggregation": "sequence_mean", "entropy_coef": 0.05, "eps_clip_high": 0.3, "temperature": 0.9,
        "max_ratio": None, "dtype": {"fp32": "float32", "bf16": "bfloat16"}[precision],
    }  # fmt: skip
    return PPOConfig(**(options | changes))


def sft(ranks: Ranks, strategy: str, precision: str, *, lora: LoRAConfig | None = None) -> Found:
    config = sft_config(ranks, strategy, precision, lora=lora)
    with _watched(step_module) as watch:
        sft_module.train_sft(
            language_model(ranks),  # type: ignore[arg-type]
            demonstrations(),
            config,
            seed=SEED,
            autocast_dtype=DTYPES[precision],
            on_step=watch.step,
            ranks=ranks,
        )
    return watch.found("model")


def reward_model(ranks: Ranks, strategy: str, precision: str) -> Found:
    config = reward_model_config(ranks, strategy, precision)
    with _watched(step_module) as watch:
        reward_model_module.train_reward_model(
            scoring_model(ranks),
            pairs(),
            config,
            seed=SEED,
            autocast_dtype=DTYPES[precision],
            on_step=watch.step,
            ranks=ranks,
        )
    return watch.found("model")


def ppo_learner(ranks: Ranks, strategy: str, precision: str, *, lora: LoRAConfig | None = None) -> PPOLearner:
    actor = tiny_llama(initializer_range=0.2, seed=ranks.rank)
    critic = Critic.from_causal_lm(actor)
    nn.init.normal_(critic.head.weight, std=0.1, generator=torch.Generator().manual_seed(ranks.rank))
    if lora is not None:
        for number, model in enumerate((actor, critic.trunk)):
            attach_lora(model, lora, seed=number)
    return PPOLearner.build(actor, critic, ppo_config(ranks, strategy, precision, lora=lora), device=DEVICE)


def ppo(ranks: Ranks, strategy: str, precision: str, *, lora: LoRAConfig | None = None) -> Found:
    """Actor and critic, each with a booster of its own."""
    learner = ppo_learner(ranks, strategy, precision, lora=lora)
    watch = Watch(dict(learner._roles))
    take = learner.training_step

    def watched(*arguments: Any) -> Any:
        stats = take(*arguments)
        watch.step(stats._asdict())
        return stats

    learner.training_step = watched  # type: ignore[method-assign]
    learn_episode(learner, experience(), seed=SEED, episode=0)
    return watch.found("actor", "critic")


STAGES: dict[str, Callable[..., Found]] = {"sft": sft, "reward_model": reward_model, "ppo": ppo}


class Watch:
    """Notes each step's metrics, and what the first one left of the gradient: the first moments."""

    def __init__(self, trained: dict[str, Trained] | None = None) -> None:
        self.trained = trained or {}
        self._numbers: dict[str, float] = {}
        self._tensors: dict[str, Tensor] = {}
        self._steps = 0

    def step(self, metrics: dict[str, float]) -> None:
        self._steps += 1
        self._numbers |= {f"{self._steps}.{name}": value for name, value in metrics.items()}
        if self._steps == 1:
            for role, (model, optimizer, _, booster) in self.trained.items():
                moments = booster.state(model, optimizer).moments.get("exp_avg", {})  # type: ignore[attr-defined]
                self._tensors |= {f"first.{role}.{name}": tensor for name, tensor in moments.items()}

    def found(self, *roles: str, steps: int = STEPS) -> Found:
        """Return all of it, with the weights as they are now."""
        assert self._steps == steps
        assert tuple(self.trained) == roles
        for role, (model, _, _, booster) in self.trained.items():
            weights = booster.weights(model)  # type: ignore[attr-defined]
            self._tensors |= {f"last.{role}.{name}": tensor for name, tensor in weights.items()}
        return Found(self._numbers, self._tensors)


@contextmanager
def _watched(module: Any) -> Iterator[Watch]:
    """Watch the model that a supervised stage makes ready for training."""
    watch, make = Watch(), module.make_trained

    def made(*arguments: Any, **options: Any) -> Trained:
        watch.trained["model"] = make(*arguments, **options)
        return watch.trained["model"]

    module.make_trained = made
    try:
        yield watch
    finally:
        module.make_trained = make

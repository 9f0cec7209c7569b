"""`PPOTrainer` with the models, prompts and settings of `rollout_runs`, alone or as one of several ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rlhf_core.config import PPOConfig
from rlhf_core.detached.rollouts import episode_problems, make_chunks
from rlhf_core.models.critic import Critic
from rlhf_core.rollout.experience import to_prompts
from rlhf_core.strategy.factory import make_booster
from rlhf_core.strategy.plain import PlainBooster
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.training.optim import make_trained, warmup_then_constant
from rlhf_core.types import Prompt
from tests.integration.rollout_runs import PROBLEMS, SEED, config, template
from tests.parallel.ranks import Found
from tests.tiny_llama import tiny_llama
from tests.unit.coati.ppo_trainers import padded, record_stats, trainer, weights


class Reference(NamedTuple):
    """What a fit came to."""

    steps: list[dict[str, float]]
    """Figures of each optimizer step."""
    weights: dict[str, torch.Tensor]
    """Of actor and critic."""


def alone() -> Reference:
    """Return the run of one rank: a loader's batch for each chunk, micro-batches as training batches."""
    settings, prompts = config(), template()
    batches = []
    for episode in range(settings.episodes):
        problems = episode_problems(PROBLEMS, settings, seed=SEED, episode=episode)
        chunks = make_chunks(problems, settings, episode=episode)
        batches += [_batch(to_prompts(chunk.problems, prompts)) for chunk in chunks]
    return _fit(
        settings, batches, len(batches) // settings.episodes, PlainBooster("fp32", 1.0), PlainBooster("fp32", 1.0)
    )


def two_ranks(ranks: Ranks) -> Found:
    """Return the run of one of two ranks, each of which makes every other row of the order of the keys; one pass."""
    settings, prompts = config(max_epochs=1), template()
    batches = []
    for episode in range(settings.episodes):
        problems = episode_problems(PROBLEMS, settings, seed=SEED, episode=episode)
        rows = sorted(to_prompts(problems, prompts), key=lambda row: row.key)
        batches.append(_batch(rows[ranks.rank :: ranks.world_size]))
    found = _fit(settings, batches, 1, *(make_booster("ddp", max_norm=1.0) for _ in range(2)), accumulation_steps=1)
    numbers = {f"{number}.{name}": value for number, step in enumerate(found.steps) for name, value in step.items()}
    return Found(numbers, found.weights)


def _batch(rows: list[Prompt]) -> dict[str, Any]:
    return padded([{"input_ids": list(row.ids)} for row in rows]) | {"key": [row.key for row in rows]}


def _fit(
    settings: PPOConfig, batches: list[Any], collect_steps: int, *boosters: Any, accumulation_steps: int = 2
) -> Reference:
    schedule = warmup_then_constant(settings.warmup_steps)
    actor = tiny_llama(initializer_range=0.2)
    models = actor, Critic.from_causal_lm(actor)
    first, second = (
        make_trained(model, lr=settings.lr, weight_decay=0.0, schedule=schedule, booster=booster)
        for model, booster in zip(models, boosters, strict=True)
    )
    ours = trainer(
        actor=first.model, critic=second.model, actor_optim=first.optimizer, critic_optim=second.optimizer,
        actor_lr_scheduler=first.scheduler, critic_lr_scheduler=second.scheduler, actor_booster=first.booster,
        critic_booster=second.booster, train_batch_size=settings.micro_batch_size,
        accumulation_steps=accumulation_steps, seed=SEED, value_clip=settings.value_clip,
    )  # fmt: skip
    stats = record_stats(ours)
    ours.fit(settings.episodes, collect_steps, settings.max_epochs, batches)
    return Reference([step._asdict() for step in stats], weights(ours))

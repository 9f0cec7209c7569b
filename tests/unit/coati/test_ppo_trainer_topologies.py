"""The public trainer and the detached one compute the same numbers."""

from __future__ import annotations

from typing import Any

import torch

from rlhf_core.coati.buffer import NaiveExperienceBuffer
from rlhf_core.coati.ppo_setup import scorer_of
from rlhf_core.coati.prompt_batches import prompts_of
from rlhf_core.config import PPOConfig, TemplateConfig
from rlhf_core.data import PromptTemplate
from rlhf_core.models.critic import Critic
from rlhf_core.ppo.episode import learn_episode
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.rollout.experience import ExperienceMaker
from rlhf_core.strategy.plain import PlainBooster
from rlhf_core.training.optim import make_trained, warmup_then_constant
from tests.tiny_llama import tiny_llama
from tests.unit.coati.ppo_trainers import (
    TOKENIZER,
    encoded,
    padded,
    record_stats,
    reward_model,
    trainer,
)


def detached_losses(batches: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return the losses of maker and learner as the detached shells call them, chunk by chunk."""
    config = PPOConfig(
        prompts_per_episode=4, chunk_size=2, train_batch_size=4, micro_batch_size=2, max_new_tokens=4, top_k=20,
        lam=0.95, kl_coef=0.1, value_clip=0.2, lr=1e-3, critic_lr=1e-3, warmup_steps=1, lora=None,
        dtype="float32", rollout_dtype="float32",
    )  # fmt: skip
    actor, template = tiny_llama(initializer_range=0.2), PromptTemplate(TOKENIZER, TemplateConfig())
    learner = PPOLearner.build(actor, Critic.from_causal_lm(actor), config, device="cpu", seed=7)
    initial = tiny_llama(initializer_range=0.2)
    scorer = scorer_of(reward_model(), scaled=True)
    maker = ExperienceMaker(learner.actor, learner.critic, scorer, initial, config=config, template=template, seed=7)
    losses = []
    for episode in range(len(batches) // 2):
        buffer = NaiveExperienceBuffer(config.train_batch_size)
        for batch in reversed(batches[2 * episode : 2 * episode + 2]):  # chunks come in any order
            made = maker.make_experience(batch["prompts"], [0, 0], episode=episode, policy_version=episode)
            buffer.append(*made)
        stats = learn_episode(learner, buffer.collect(), seed=7, episode=episode)
        losses += [(step.actor_loss, step.critic_loss) for step in stats]
    return losses


def test_the_public_trainer_and_the_detached_ones_core_give_the_same_five_losses_from_one_seed() -> None:
    batches = [padded(encoded([f"{a} plus {a + 1}", f"{a} times {a}"])) for a in range(10)]
    for batch in batches:
        batch["prompts"] = prompts_of(batch, TOKENIZER)
    expected = detached_losses(batches)

    actor = tiny_llama(initializer_range=0.2)

    def trained(model: torch.nn.Module) -> Any:
        schedule = warmup_then_constant(1)
        return make_trained(model, lr=1e-3, weight_decay=0.0, schedule=schedule, booster=PlainBooster())

    first, second = trained(actor), trained(Critic.from_causal_lm(actor))
    ours = trainer(
        actor=first.model, critic=second.model, actor_optim=first.optimizer, critic_optim=second.optimizer,
        actor_lr_scheduler=first.scheduler, critic_lr_scheduler=second.scheduler, accumulation_steps=2, seed=7,
    )  # fmt: skip
    stats = record_stats(ours)
    ours.fit(5, 2, 1, batches)
    assert len(stats) == 5
    assert [(step.actor_loss, step.critic_loss) for step in stats] == expected  # to the bit

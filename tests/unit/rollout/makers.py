"""Makers of tiny models, and what they are asked for."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from rlhf_core.config import PPOConfig, RewardConfig, TemplateConfig
from rlhf_core.data import Problem, PromptTemplate
from rlhf_core.models.critic import Critic
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.rewards.scoring import build_scorer
from rlhf_core.rollout.experience import ExperienceMaker, MadeExperience, to_prompts
from tests.tiny_llama import tiny_llama, tiny_tokenizer

PROBLEMS = [Problem("Sort 3 1", "1 3"), Problem("Sort 2", "2"), Problem("Sort 9 8 7", "7 8 9"), Problem("1+1", "2")]
SAMPLES = [0, 0, 0, 0]
CONFIG = PPOConfig(
    prompts_per_episode=4, chunk_size=4, train_batch_size=4, micro_batch_size=4, max_new_tokens=6,
    max_prompt_tokens=80, kl_coef=0.3, gamma=0.9, lam=0.8, dtype="float32", rollout_dtype="float32",
)  # fmt: skip
TEMPLATE = PromptTemplate(tiny_tokenizer(), TemplateConfig())
PROMPTS = to_prompts(PROBLEMS, TEMPLATE)
WITH_REWARD_MODEL = RewardConfig(verifier=0.5, reward_model=2.0)


def actor() -> LlamaForCausalLM:
    """An actor that stops now and then, so that lengths differ."""
    model = tiny_llama(seed=1, initializer_range=0.3)
    with torch.no_grad():
        model.model.embed_tokens.weight[2] *= 3  # tied: the stop token's logits spread widely
    return model


def critic() -> Critic:
    made = Critic.from_causal_lm(tiny_llama(seed=3, initializer_range=0.2))
    torch.nn.init.normal_(made.head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    return made


def reward_model() -> RewardModel:
    torch.manual_seed(0)
    model = RewardModel.from_causal_lm(tiny_llama(seed=4, initializer_range=0.2))
    model.score_mean.fill_(0.25)
    model.score_std.fill_(0.5)
    return model


def maker(**changes: object) -> ExperienceMaker:
    config = CONFIG.model_copy(update=changes)
    judge = reward_model() if config.reward.reward_model else None
    return ExperienceMaker(
        actor(),
        critic(),
        build_scorer(config.reward, judge, template=TEMPLATE),
        tiny_llama(seed=2, initializer_range=0.2),
        config=config,
        template=TEMPLATE,
        seed=5,
    )


def make(ours: ExperienceMaker, *, episode: int = 0) -> MadeExperience:
    return ours.make_experience(PROMPTS, SAMPLES, episode=episode, policy_version=3)

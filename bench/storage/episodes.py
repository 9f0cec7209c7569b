"""Real PPO episodes in one process, at the quickstart's settings: what its training states are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.comparison.careless import careless_response
from flows.presets import resolve
from infra.settings import settings
from rlhf_core.coati.buffer import NaiveExperienceBuffer
from rlhf_core.config import PipelineConfig
from rlhf_core.data import PromptTemplate
from rlhf_core.data.encoding import encode_demonstrations
from rlhf_core.data.gym import draw_problems
from rlhf_core.data.problems import Problem
from rlhf_core.detached.rollouts import episode_problems, make_chunks
from rlhf_core.models.critic import Critic
from rlhf_core.models.loading import load_causal_lm, load_tokenizer, locate_model
from rlhf_core.models.lora import attach_lora, save_merged
from rlhf_core.ppo.episode import learn_episode
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.rewards.scoring import build_scorer
from rlhf_core.rewards.verifying import judge_of
from rlhf_core.rollout.experience import ExperienceMaker, to_prompts
from rlhf_core.supervised.sft import train_sft
from rlhf_core.types import Experience, Sample

SFT_SEED, PPO_SEED, PROBLEMS = 11, 12, 512
ALL_WEIGHTS = {"ppo.lora": None, "ppo.lr": 1e-5, "ppo.critic_lr": 1e-4}  # the rates of PPOConfig: adapters take more


class State(NamedTuple):
    """What a trainer would hand to its keeper after an episode."""

    tensors: Mapping[str, Tensor]
    facts: dict[str, Any]
    samples: list[Sample]


def config_of(what: str) -> PipelineConfig:
    """Return the quickstart with adapters or with all weights trained, and the verifier as its only judge."""
    changes: dict[str, Any] = {"ppo.reward": {"verifier": 1.0, "reward_model": 0.0}}
    return resolve("quickstart", overrides=changes | (ALL_WEIGHTS if what == "all_weights" else {}))


def supervised_start(directory: Path, demonstrations: int) -> None:
    """Write a model that has learnt the form from careless demonstrations, as the quickstart's SFT does."""
    config = config_of("adapters")
    source = locate_model(config.model.path, models_dir=settings().models_dir)
    tokenizer = load_tokenizer(source)
    drawn = _problems(config, SFT_SEED, demonstrations)
    shown = [replace(problem, demonstration=careless_response(problem)) for problem in drawn]
    model = load_causal_lm(source, "float32")
    examples = encode_demonstrations(shown, PromptTemplate(tokenizer, config.template))
    train_sft(model, examples, config.sft, seed=config.seed, autocast_dtype=getattr(torch, config.sft.dtype))
    save_merged(model, directory)
    tokenizer.save_pretrained(directory)


def states(start: Path, config: PipelineConfig, episodes: int) -> Iterator[State]:
    """Collect and learn, episode by episode, and yield the state after each.

    Args:
        start: the model that PPO begins with.
        config: the run's.
        episodes: how many.
    """
    for learner, samples in learners(start, config, episodes):
        tensors, facts = learner.state()
        yield State(tensors, facts, samples)


def learners(start: Path, config: PipelineConfig, episodes: int) -> Iterator[tuple[PPOLearner, list[Sample]]]:
    """Collect and learn, episode by episode; yield the learner and its samples after each."""
    learner, maker = _build(start, config)
    problems = _problems(config, PPO_SEED, PROBLEMS)
    try:
        for episode in range(episodes):
            experience, samples = _collect(maker, problems, config, episode)
            learn_episode(learner, experience, seed=config.seed, episode=episode)
            yield learner, samples
    finally:
        maker.close()


def _build(start: Path, config: PipelineConfig) -> tuple[PPOLearner, ExperienceMaker]:
    actor = load_causal_lm(start, "float32")
    critic = Critic.from_causal_lm(actor)
    if config.ppo.lora is not None:
        attach_lora(actor, config.ppo.lora, seed=config.seed)
        attach_lora(critic.trunk, config.ppo.lora, seed=config.seed)
    template = PromptTemplate(load_tokenizer(start), config.template)
    judge = judge_of(config, template=template, allowed_modules=())
    maker = ExperienceMaker(
        actor=actor,
        critic=critic,
        scorer=build_scorer(config.ppo.reward, None, template=template, judge=judge),
        initial_model=load_causal_lm(start, config.ppo.rollout_dtype),
        config=config.ppo,
        template=template,
        seed=config.seed,
        legacy_form="detached",
    )
    return PPOLearner.build(actor, critic, config.ppo, device="cpu", seed=config.seed), maker


def _collect(
    maker: ExperienceMaker, problems: list[Problem], config: PipelineConfig, episode: int
) -> tuple[Experience, list[Sample]]:
    due = episode_problems(problems, config.ppo, seed=config.seed, episode=episode)
    buffer = NaiveExperienceBuffer(config.ppo.train_batch_size)
    samples: list[Sample] = []
    for chunk in make_chunks(due, config.ppo, episode=episode):
        prompts = to_prompts(chunk.problems, maker.template)
        made = maker.make_experience(prompts, chunk.samples, episode=episode, policy_version=episode)
        buffer.append(made.experience, made.samples)
        samples += made.samples
    return buffer.collect(), samples


def _problems(config: PipelineConfig, seed: int, count: int) -> list[Problem]:
    assert config.data.task is not None  # the quickstart's
    return draw_problems(config.data.task, config.data.task_parameters, seed=seed, count=count)

"""Real tokens of those that are computed: our own code makes the batches, and a model counts what it reads.

The model has one small layer and few words: lengths are the data's, ids are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from bench.speed import data
from bench.speed.measure import Found, Run
from rlhf_core.config import PPOConfig, RewardModelConfig, SFTConfig
from rlhf_core.data.encoding import EncodedPair
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.models.trunk import trunk_of
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.ppo.order import minibatch_order
from rlhf_core.rewards.scoring import ScoringBatch
from rlhf_core.rollout.experience import token_logprobs
from rlhf_core.strategy.ranks import ALONE
from rlhf_core.supervised.batches import MaskedTokens
from rlhf_core.supervised.reward_model import train_reward_model
from rlhf_core.supervised.sft import train_sft
from rlhf_core.training.padding import PaddedBatch, pad_examples
from rlhf_core.types import Experience

WORDS = 64
CPU = torch.device("cpu")
Parts = list[tuple[list[int], list[int]]]
"""Prompts and responses."""


def sft(run: Run, rows: Callable[[Run], Sequence[MaskedTokens]]) -> Found:
    """Measure an epoch of supervised fine-tuning, as the default configuration cuts it."""
    examples = [MaskedTokens(_small(row.ids), row.loss_mask) for row in rows(run)]
    config = SFTConfig(max_length=data.longest(run))
    examples = [row for row in examples if len(row.ids) <= config.max_length]
    model = _model(run)
    with _counting(model) as computed:
        train_sft(model, examples, config, seed=0, autocast_dtype=torch.float32, ranks=ALONE)
    return _share(sum(len(row.ids) for row in examples), computed, config.micro_batch_size)


def reward(run: Run) -> Found:
    """Measure an epoch of a reward model's training."""
    pairs = [EncodedPair(_small(pair.chosen), _small(pair.rejected)) for pair in data.hh_pairs(run)]
    config, model = RewardModelConfig(max_length=data.longest(run)), _model(run)
    with _counting(model) as computed:
        scores = RewardModel(trunk_of(model))
        train_reward_model(scores, pairs, config, seed=0, autocast_dtype=torch.float32, ranks=ALONE)
    return _share(sum(len(pair.chosen) + len(pair.rejected) for pair in pairs), computed, config.micro_batch_size)


def scoring(run: Run, rows: Callable[[Run], Sequence[MaskedTokens]]) -> Found:
    """Measure one model's scoring of prompts and responses of the data's lengths, a chunk of PPO at a time."""
    config, model, parts = PPOConfig(), _model(run), _parts(rows(run))
    with _counting(model) as computed:
        for start in range(0, len(parts), config.chunk_size):
            chunk = pad_examples(parts[start : start + config.chunk_size], CPU)
            ended = torch.ones(len(chunk.sequences), dtype=torch.bool)
            token_logprobs(model, ScoringBatch([], [], ended, *chunk), temperature=1.0, config=config)
    return _share(_tokens(parts), computed, config.chunk_size)


def learning(run: Run, rows: Callable[[Run], Sequence[MaskedTokens]]) -> Found:
    """Measure how an actor learns prompts and responses of the data's lengths, all of them in one episode."""
    config = PPOConfig(advantage_estimator="rloo", samples_per_prompt=2, micro_batch_size=8, dtype="float32", lora=None)
    parts, size = _parts(rows(run)), config.train_batch_size
    model = _model(run)
    learner = PPOLearner.build(model, None, config, device=CPU)
    steps = minibatch_order(seed=0, episode=0, epoch=0, samples=len(parts), batch_size=size)
    with _counting(model) as computed:
        restated = learner.recompute(_experience(pad_examples(parts, CPU)), steps)
        for step in steps:
            learner.training_step(restated.select(step))
    return _share(2 * _tokens(parts), computed, config.micro_batch_size)


def _experience(batch: PaddedBatch) -> Experience:
    numbers = torch.randn(batch.action_mask.shape, generator=torch.Generator().manual_seed(0))
    names = ("action_log_probs", "values", "reward", "kl", "advantages", "rollout_log_probs", "returns")
    versions = torch.zeros(len(numbers), dtype=torch.long)
    return Experience(**batch._asdict(), **dict.fromkeys(names, numbers), policy_version=versions)


def _parts(rows: Sequence[MaskedTokens]) -> Parts:
    """Return each row's prompt, and what is learnt of it."""
    starts = [row.loss_mask.index(1) for row in rows]
    return [(_small(row.ids[:start]), _small(row.ids[start:])) for row, start in zip(rows, starts, strict=True)]


def _tokens(parts: Parts) -> int:
    return sum(len(prompt) + len(response) for prompt, response in parts)


def _small(ids: Sequence[int]) -> list[int]:
    return [token % WORDS for token in ids]


def _model(run: Run) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
            max_position_embeddings=2 * data.longest(run),
        )
    )  # fmt: skip


@contextmanager
def _counting(model: LlamaForCausalLM) -> Iterator[list[int]]:
    """Collect the number of tokens that the model reads in each pass: whoever computes one looks up its embedding."""
    counts: list[int] = []

    def count(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        counts.append(inputs[0].numel())

    handle = model.get_input_embeddings().register_forward_pre_hook(count)
    try:
        yield counts
    finally:
        handle.remove()


def _share(real: int, computed: Sequence[int], rows: int) -> Found:
    return Found(real / sum(computed), limit=1.0, settings={"rows": rows, "tokens": real, "computed": sum(computed)})

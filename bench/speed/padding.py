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
from rlhf_core.generation.responses import pad_left
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.models.trunk import trunk_of
from rlhf_core.rewards.scoring import ScoringBatch
from rlhf_core.rollout.experience import token_logprobs
from rlhf_core.strategy.ranks import ALONE
from rlhf_core.supervised.batches import MaskedTokens
from rlhf_core.supervised.reward_model import train_reward_model
from rlhf_core.supervised.sft import train_sft
from rlhf_core.training.padding import pad_right

WORDS = 64
CPU = torch.device("cpu")


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
    config, model = PPOConfig(), _model(run)
    parts = [
        (ids[:start], ids[start:]) for ids, start in ((_small(row.ids), row.loss_mask.index(1)) for row in rows(run))
    ]
    with _counting(model) as computed:
        for start in range(0, len(parts), config.chunk_size):
            chunk = parts[start : start + config.chunk_size]
            prompts, prompt_mask = pad_left([prompt for prompt, _ in chunk], 0, CPU)
            responses, mask = pad_right([response for _, response in chunk], CPU)
            sequences = torch.cat([prompts, responses], dim=1)
            attended = torch.cat([prompt_mask.bool(), mask], dim=1)
            batch = ScoringBatch([], [], torch.ones(len(chunk), dtype=torch.bool), sequences, attended, mask)
            token_logprobs(model, batch, temperature=1.0, config=config)
    return _share(sum(len(prompt) + len(response) for prompt, response in parts), computed, config.chunk_size)


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

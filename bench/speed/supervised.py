"""One optimizer step of supervised fine-tuning and of a reward model, all weights trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from transformers import PreTrainedModel

from bench.speed import data, peers
from bench.speed.measure import Found, Run, in_turns, now
from bench.speed.models import ARITHMETIC, DTYPE, load
from bench.speed.products import Products, distinct
from rlhf_core.config import RewardModelConfig, SFTConfig
from rlhf_core.data.encoding import EncodedPair
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.models.trunk import trunk_of
from rlhf_core.strategy.ranks import ALONE
from rlhf_core.supervised.batches import MaskedTokens
from rlhf_core.supervised.reward_model import train_reward_model
from rlhf_core.supervised.sft import train_sft
from rlhf_core.training.optim import Metrics, OnStep

Lengths = Literal["quickstart", "hh"]
ROWS = {"quickstart": 16, "hh": 8}
TINY_ROWS = 2


def sft(run: Run, lengths: Lengths) -> Found:
    """Measure a step on demonstrations."""
    model = load(run, "float32")
    count = TINY_ROWS if run.tiny else ROWS[lengths]
    if lengths == "hh":
        rows = data.hh(run)[:count]
    else:
        parts = data.quickstart(run, count)
        rows = [MaskedTokens(prompt + answer, [False] * len(prompt) + [True] * len(answer)) for prompt, answer in parts]
    tokens = distinct([row.ids for row in rows])
    limit = _floor(run, model, tokens, sum(sum(row.loss_mask) for row in rows))
    config = SFTConfig(
        epochs=run.rounds + 1, batch_size=count, micro_batch_size=count, max_length=max(len(row.ids) for row in rows)
    )

    def train(on_step: OnStep) -> None:
        train_sft(model, rows, config, seed=0, autocast_dtype=DTYPE, on_step=on_step, ranks=ALONE)

    return _found(
        train, peers.sft_step(run, rows), limit, rows=count, tokens=sum(len(row.ids) for row in rows), distinct=tokens
    )


def reward(run: Run, lengths: Lengths) -> Found:
    """Measure a step on preference pairs."""
    model = load(run, "float32")
    count = TINY_ROWS if run.tiny else ROWS[lengths]
    if lengths == "hh":
        pairs = data.hh_pairs(run)[:count]
    else:
        parts = data.quickstart(run, count)
        others = [answer for _, answer in [*parts[1:], parts[0]]]
        pairs = [EncodedPair(prompt + good, prompt + bad) for (prompt, good), bad in zip(parts, others, strict=True)]
    sides = [side for pair in pairs for side in pair[:2]]
    tokens = distinct(sides)
    limit = _floor(run, model, tokens, 0)
    longest = max(pair.longest for pair in pairs)
    config = RewardModelConfig(epochs=run.rounds + 1, batch_size=count, micro_batch_size=count, max_length=longest)
    scores = RewardModel(trunk_of(model))

    def train(on_step: OnStep) -> None:
        train_reward_model(scores, pairs, config, seed=0, autocast_dtype=DTYPE, on_step=on_step, ranks=ALONE)

    return _found(train, peers.reward_step(run, pairs), limit, rows=count, tokens=sum(map(len, sides)), distinct=tokens)


def _found(train: Callable[[OnStep], None], theirs: peers.Step, limit: float, **sizes: int) -> Found:
    """Train for some steps, after each of which the peer takes one of its own.

    The first of both is left out: there an optimizer reserves its memory.
    """
    ours, peer = [], []
    began = now()

    def on_step(_: Metrics) -> None:
        nonlocal began
        ours.append(now() - began)
        peer.append(theirs())
        began = now()

    train(on_step)
    settings = {"dtype": ARITHMETIC, **sizes, "trl": peers.trl_version(), "limit": "products alone"}
    return Found(min(ours[1:]), min(peer[1:]), limit, settings)


def _floor(run: Run, model: PreTrainedModel, tokens: int, scored: int) -> float:
    products = Products.of(model, DTYPE)
    with torch.inference_mode():
        return in_turns(run.rounds, lambda: products.learn(tokens, scored, learns_weights=True))[0]

"""How a cost grows: the slope of its logarithm over that of a size. 1 is as the size, 2 as its square."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import linear_regression
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

from bench.speed.learning import experience
from bench.speed.measure import DEVICE, Found, Run, in_turns
from bench.speed.models import ARITHMETIC, DTYPE, OUR_ADAPTERS, load, with_adapters
from flows.presets import resolve
from rlhf_core.models.critic import Critic
from rlhf_core.ppo.learner import PPOLearner

ROWS = 16
PROMPT, RESPONSE = 21, 15
"""Tokens of a row, about those of the quickstart."""
VOCABULARY = 1024
WIDTHS = (256, 384, 576, 864)


def slope_of(costs: Mapping[float, float]) -> Found:
    """Return the slope of costs over sizes, by least squares, and what it was fitted to."""
    logs = [[math.log(each) for each in column] for column in (list(costs), list(costs.values()))]
    told = {f"at {size:g}": float(f"{cost:.3g}") for size, cost in costs.items()}
    return Found(linear_regression(*logs).slope, limit=1.0, settings={"limit": "as the size", **told})


def batch(run: Run) -> Found:
    """Measure an optimizer step with more and more rows in micro-batches of one size."""
    sizes = (2, 4) if run.tiny else (16, 32, 64, 128)
    return slope_of(_steps(run, [partial(_step, load(run, ARITHMETIC), rows, RESPONSE) for rows in sizes], sizes))


def length(run: Run) -> Found:
    """Measure a step with longer and longer rows."""
    sizes = (32, 64) if run.tiny else (64, 128, 256, 512)
    calls = [partial(_step, load(run, ARITHMETIC), 4 if run.tiny else ROWS, size - PROMPT) for size in sizes]
    return slope_of(_steps(run, calls, sizes))


def size(run: Run) -> Found:
    """Measure a step of models with more and more weights in their layers."""
    widths = (32, 64) if run.tiny else WIDTHS
    models = [_model(width) for width in widths]
    weights = [sum(each.numel() for each in model.model.layers.parameters()) for model in models]
    return slope_of(
        _steps(run, [partial(_step, model, 2 if run.tiny else ROWS, RESPONSE) for model in models], weights)
    )


def _steps(
    run: Run, prepared: Sequence[Callable[[], Callable[[], object]]], sizes: Sequence[float]
) -> dict[float, float]:
    return dict(zip(sizes, in_turns(run.rounds, *(prepare() for prepare in prepared)), strict=True))


def _step(model: Any, rows: int, response: int) -> Callable[[], object]:
    """Return a step that is ready to be taken."""
    sizes = {"train_batch_size": rows, "micro_batch_size": min(rows, ROWS)}
    config = resolve("quickstart").ppo.model_copy(update={"dtype": ARITHMETIC, "lora": OUR_ADAPTERS, **sizes})
    critic = Critic.from_causal_lm(model)
    with_adapters(critic.trunk)
    learner = PPOLearner.build(with_adapters(model), critic, config, device=DEVICE)
    made = learner.recompute(experience(rows, PROMPT, response, vocabulary=model.config.vocab_size))
    return partial(learner.training_step, made)


def _model(width: int) -> LlamaForCausalLM:
    """Return a model of eight layers with random weights, as wide as is asked."""
    heads = width // 32
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=8,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=1024, dtype=ARITHMETIC,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(DEVICE, DTYPE)

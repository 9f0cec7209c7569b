"""What a learner publishes: all weights, with adapters merged or apart, or only what it trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from rlhf_core.config import PPOConfig
from rlhf_core.models.lora import MergedWeight, adapter_config, each_merged
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.strategy.booster import Piece
from rlhf_core.strategy.three_d import ThreeDBooster
from rlhf_core.training.boosted import exact, trained_on_first

_ROLES: tuple[Literal["actor", "critic"], ...] = ("actor", "critic")


def published_weights(learner: PPOLearner, dtype: torch.dtype, *, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights of actor and critic, for a full publication.

    Every rank calls this and goes through it to the end; only the first is given weights. They are as the learner holds
    them, for the publisher to cast, but for merged ones: summed in float32, and rounded once.

    Args:
        learner: whose weights.
        dtype: the makers' `rollout_dtype`.
        merged: True for makers without adapters: adapters are added to the weights below them. False for makers that
            carry adapters, under the names that the learner has: `...base_layer.weight` and `...lora_A.default.weight`.
    """
    for role in _ROLES:
        trained = learner.trained(role)
        if trained is None:
            continue
        with exact(trained.booster, trained.model) as model:
            weights = () if model is None else each_merged(model) if merged else _as_they_are(model)
            for name, weight, is_sum in weights:
                yield f"{role}.{name}", weight.to(dtype) if is_sum else weight


def trained_weights(learner: PPOLearner) -> Iterator[tuple[str, Tensor]]:
    """Yield what the learner trains of actor and critic: adapters and heads, or trained weights; for an update.

    Every rank calls this and goes through it to the end; only the first is given weights, copies in host memory.

    Args:
        learner: whose weights; its makers' models carry adapters if its own do.
    """
    for role in _ROLES:
        trained = learner.trained(role)
        if trained is None:
            continue
        for name, weight in trained_on_first(trained.booster, trained.model, learner.ranks).items():
            yield f"{role}.{name}", weight


def weights_to_publish(learner: PPOLearner, config: PPOConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield what a run sends its makers: merged weights, or adapters and heads for those that started with the rest.

    Every rank calls this and goes through it to the end.

    Args:
        learner: whose weights.
        config: says which.
    """
    if config.sends_adapters:
        return trained_weights(learner)
    return published_weights(learner, getattr(torch, config.rollout_dtype))


def pieces_to_publish(learner: PPOLearner, config: PPOConfig) -> list[Piece] | None:
    """Return what this process has of `weights_to_publish`, where several hold a model in parts; else None.

    None too where adapters are merged, which needs whole matrices.

    Args:
        learner: whose weights.
        config: says which.
    """
    found: list[Piece] = []
    for role in _ROLES:
        trained = learner.trained(role)
        if trained is None:
            continue
        if not isinstance(trained.booster, ThreeDBooster) or learner.ranks.shards.world_size == 1:
            return None
        if not config.sends_adapters and adapter_config(trained.model) is not None:
            return None
        own = trained.booster.pieces(trained.model, trained_only=config.sends_adapters)
        found += [piece._replace(name=f"{role}.{piece.name}") for piece in own]
    return found


def _as_they_are(model: nn.Module) -> Iterator[MergedWeight]:
    for name, parameter in model.named_parameters():
        yield MergedWeight(name, parameter.detach(), is_sum=False)

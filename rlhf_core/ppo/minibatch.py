"""A minibatch as the losses take it: whitened, weighted, and with its denominator, all agreed between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_core.config import LearningConfig
from rlhf_core.errors import ConfigError, TrainingError
from rlhf_core.functional.advantages import share_explained
from rlhf_core.functional.moments import Moments, deviation_sum, masked_sums, whiten_with
from rlhf_core.functional.weights import aggregation_count, aggregation_weights, importance_weights
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.training.micro_batches import PassCost, Piece, in_order, pieces
from rlhf_core.types import Experience

WHITENED = frozenset({"gae", "reinforce_pp"})
"""Estimators whose advantages are whitened over the minibatch; the others compare within a prompt's samples already."""


class Micro(NamedTuple):
    """What goes through a model at once."""

    experience: Experience
    weights: Tensor
    """[B A], of each token in the sums."""
    importance: Tensor | None
    """[B A], detached; None without a correction."""


class Minibatch(NamedTuple):
    """This rank's share of a minibatch."""

    micros: list[Micro]
    """None if every response of all ranks abstains."""
    denominator: Tensor
    """Of the losses' sums, over all ranks."""
    tokens: int
    """Response tokens of all ranks, which all other means are over; 0 if every response abstains."""
    figures: dict[str, float]


def agreed_moments(columns: Sequence[Tensor], mask: Tensor, ranks: Ranks) -> list[Moments]:
    """Return the moments of each column over the tokens of all ranks, in float64 and two passes.

    Args:
        columns: [B A] each.
        mask: [B A], True on response tokens.
        ranks: who shares the minibatch.
    """
    doubles = [column.double() for column in columns]
    sums = ranks.sum(torch.stack([torch.stack(masked_sums(column, mask)) for column in doubles]))
    counts, totals = sums.unbind(dim=1)
    means = totals / counts.clamp(min=1)
    squares = ranks.sum(
        torch.stack([deviation_sum(column, mask, mean=mean) for column, mean in zip(doubles, means, strict=True)])
    )
    variances = squares / counts.clamp(min=1)
    return [Moments(*row) for row in zip(counts, means, variances, strict=True)]


def prepare(
    batch: Experience,
    config: LearningConfig,
    *,
    ranks: Ranks,
    longest: int | None,
    cost: PassCost | None,
    with_critic: bool,
) -> Minibatch:
    """Return the minibatch in micro-batches, its moments and denominator agreed between ranks.

    Args:
        batch: this rank's rows, on their device; none if other ranks have some.
        config: how to learn.
        ranks: who shares the minibatch.
        longest: tokens that a sum is divided by with `constant_length`.
        cost: as for `micros_of`.
        with_critic: whether returns are needed.

    Raises:
        TrainingError: on all ranks, if any has no returns that are needed.
    """
    mask = batch.action_mask
    returns = batch.values if batch.returns is None else batch.returns
    errors = returns - batch.values
    advantage, value, target, error = agreed_moments([batch.advantages, batch.values, returns, errors], mask, ranks)
    tokens = int(advantage.count.item())
    if with_critic and ranks.any(batch.returns is None):
        raise TrainingError(
            f"advantage estimator {config.advantage_estimator} trains the critic on returns, but the experience has "
            "none; make it with the same estimator"
        )
    if not tokens:
        return Minibatch([], torch.ones((), device=mask.device), 0, {})
    if config.advantage_estimator in WHITENED and not config.legacy:
        whitened = whiten_with(batch.advantages, mask, mean=advantage.mean, variance=advantage.variance)
        batch = batch.replace(advantages=whitened)
    weights = _weights(mask, config, longest)
    importance, importance_mean = _importance(batch, config, tokens, ranks)
    square = target.variance + target.mean.square()
    explained = share_explained(unexplained=error.variance, total=target.variance, square=square)
    figures = {
        "advantage_mean": advantage.mean.item(),
        "advantage_std": advantage.variance.sqrt().item(),
        "value_mean": value.mean.item() if with_critic else 0.0,
        "explained_variance": explained.item() if with_critic else 0.0,
        "importance_weight": importance_mean,
    }
    micros = [
        Micro(_rows_of(batch, piece), piece.take(weights), None if importance is None else piece.take(importance))
        for piece in micros_of(batch, config, cost)
    ]
    denominator = ranks.sum(aggregation_count(mask, aggregation=config.aggregation))
    return Minibatch(micros, denominator, tokens, figures)


def micros_of(batch: Experience, config: LearningConfig, cost: PassCost | None) -> list[Piece]:
    """Return how rows that are learnt in one step go through a model: in micro-batches.

    Args:
        batch: this rank's rows; there may be none, as an episode's last minibatch may have fewer rows than ranks.
        config: with the largest micro-batch.
        cost: of passes; None cuts them in their order.
    """
    if cost is None:
        return in_order(batch.sequences, batch.attention_mask, batch.num_actions, config.micro_batch_size)
    masks = (batch.attention_mask, batch.action_mask)
    return pieces(batch.sequences, *masks, most=config.micro_batch_size, cost=cost)


def _rows_of(batch: Experience, piece: Piece) -> Experience:
    by_token = {
        name: piece.take(each) for name, each in batch.tensors().items() if each.shape == batch.action_mask.shape
    }
    return batch.replace(
        **by_token,
        sequences=piece.sequences,
        attention_mask=piece.attention_mask,
        policy_version=batch.policy_version[piece.rows.to(batch.policy_version.device)],
    )


def _weights(mask: Tensor, config: LearningConfig, longest: int | None) -> Tensor:
    if config.aggregation == "constant_length" and longest is None:
        raise ConfigError(
            "ppo.aggregation constant_length divides by the longest response; hand the learner max_new_tokens, or "
            "choose token_mean or sequence_mean"
        )
    return aggregation_weights(mask, aggregation=config.aggregation, max_tokens=longest or mask.shape[1])


def _importance(batch: Experience, config: LearningConfig, tokens: int, ranks: Ranks) -> tuple[Tensor | None, float]:
    if config.correction == "none":
        return None, 1.0
    weights = importance_weights(
        logprobs=batch.action_log_probs,
        behaviour_logprobs=batch.rollout_log_probs,
        mask=batch.action_mask,
        cap=config.importance_cap,
    )
    total = torch.where(batch.action_mask, weights, 0.0).sum()
    return weights, ranks.sum(total).item() / tokens

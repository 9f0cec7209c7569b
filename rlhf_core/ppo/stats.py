"""One optimizer step of PPO in numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

_LARGEST = 3.4028234663852886e38  # of float32, in which losses are summed: means of many in float64 stay finite


class PPOStats(NamedTuple):
    """One optimizer step in numbers; means are over the minibatch's response tokens, on all ranks.

    Losses are aggregated as `aggregation` says; everything else is a mean over tokens whatever it says.
    """

    actor_loss: float
    """The policy's loss alone: neither ptx nor entropy is in it."""
    critic_loss: float
    """Before `vf_coef`; 0 without a critic, as are all of the critic's figures."""
    clip_fraction: float
    """Share of tokens whose policy gradient the clip cut off."""
    value_clip_fraction: float
    """Share of tokens whose value gradient the clip cut off."""
    approx_kl: float
    """k3 estimate of KL(pi_old || pi) before the step, in nats per token."""
    entropy: float
    """Of the actor before the step, in nats per token."""
    explained_variance: float
    """How well the critic that made the experience predicted its returns."""
    actor_grad_norm: float
    """Before clipping; 0 if no step was taken."""
    critic_grad_norm: float
    """As the actor's."""
    actor_lr: float
    critic_lr: float
    ptx_loss: float
    """Of the demonstrations, before `ptx_coef`, in nats per token; 0 without them."""
    skipped: float
    """1 if the actor's step was left out because a ratio exploded."""
    actor_overflowed: float
    """1 if the actor's step was left out because its gradient overflowed in float16; the loss scale is halved then."""
    critic_overflowed: float
    """As the actor's."""
    max_ratio: float
    """Largest ratio of new to old probability among all tokens."""
    advantage_mean: float
    """Before whitening."""
    advantage_std: float
    """Before whitening."""
    value_mean: float
    """Of the critic that made the experience."""
    importance_weight: float
    """Mean weight of the correction for samples of another policy; 1 without one."""


def stats_from(figures: Mapping[str, float]) -> PPOStats:
    """Return the record of a step; what overflowed is the largest number, so that JSON can hold it.

    Only a step that was not taken has figures that are no finite numbers: after an explosion 0 stands for NaN.
    """
    return PPOStats(**{name: _finite(figures.get(name, 0.0)) for name in PPOStats._fields})


def _finite(value: float) -> float:
    return 0.0 if math.isnan(value) else max(-_LARGEST, min(_LARGEST, value))

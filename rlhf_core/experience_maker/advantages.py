"""From scores to what the learner learns from: rewards, advantages and the critic's targets of one chunk."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rlhf_core.config import RolloutConfig
from rlhf_core.functional.advantages import gae, token_rewards


class Judgement(NamedTuple):
    """One chunk, scored."""

    scores: Tensor
    """[B], as they are paid: normalised and clipped if the configuration says so."""
    kl: Tensor
    """[B A]"""
    values: Tensor
    """[B A], zero on padding and without a critic."""
    mask: Tensor
    """[B A]"""


class Estimates(NamedTuple):
    """What is learnt from."""

    rewards: Tensor
    """[B A]"""
    advantages: Tensor
    """[B A], not whitened."""
    returns: Tensor | None
    """[B A], targets of the critic; None without one."""


def estimate(judged: Judgement, *, config: RolloutConfig, kl_coef: float) -> Estimates:
    """Return rewards, advantages and returns by the configuration's estimator."""
    rewards = token_rewards(scores=judged.scores, kl=judged.kl, mask=judged.mask, kl_coef=kl_coef)
    advantages = gae(rewards=rewards, values=judged.values, mask=judged.mask, gamma=config.gamma, lam=config.lam)
    return Estimates(rewards, advantages, advantages + judged.values)

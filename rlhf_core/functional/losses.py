"""What is minimised. Every loss is a sum over tokens or pairs divided by a denominator that is handed in.

The denominator counts the whole minibatch, not the micro-batch at hand, so that the gradients of
micro-batches add up to the gradient of the minibatch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as nn_functional

from rlhf_core.functional.masking import masked_sum

Denominator = int | float | Tensor


class PolicyTerms(NamedTuple):
    """The loss to differentiate and two detached diagnostics, all sums over the same denominator."""

    loss: Tensor
    clip_fraction: Tensor
    """Share of tokens whose gradient the clip cut off."""
    approx_kl: Tensor
    """k3 estimate of KL(pi_old || pi), in nats per token."""


class ValueTerms(NamedTuple):
    """The loss to differentiate and a detached diagnostic, both sums over the same denominator."""

    loss: Tensor
    clip_fraction: Tensor
    """Share of tokens whose gradient the clip cut off."""


def policy_loss(
    *,
    logprobs: Float[Tensor, "B A"],
    old_logprobs: Float[Tensor, "B A"],
    advantages: Float[Tensor, "B A"],
    mask: Bool[Tensor, "B A"],
    denominator: Denominator,
    clip_eps: float,
) -> PolicyTerms:
    """Return PPO's clipped surrogate, negated.

        rho_t = exp(log pi - log pi_old)
        L     = -sum_t min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t) / denominator

    A token mean over the minibatch, not a mean of sequence means. A token is clipped when the clipped term is
    the smaller: then its gradient is zero. Outside the interval on the harmless side it is not.

    Args:
        logprobs: of the policy being trained.
        old_logprobs: of the policy that the experience came from, by the learner's own forward; no gradient.
        advantages: whitened or not; no gradient.
        mask: True on response tokens.
        denominator: response tokens of the minibatch.
        clip_eps: half-width of the interval around 1, above 0.

    Returns:
        Loss, clip fraction, and the k3 estimate of KL(pi_old || pi).

    Source:
        Schulman et al. 2017, arXiv:1707.06347, equation 7.

    Example:
        >>> ratio = torch.tensor([[1.5, 1.5]])
        >>> gain = torch.tensor([[1.0, -1.0]])
        >>> policy_loss(logprobs=ratio.log(), old_logprobs=0 * ratio, advantages=gain, mask=ratio > 0,
        ...             denominator=2, clip_eps=0.2).loss  # -(1.2 - 1.5) / 2
        tensor(0.1500)
    """
    zero = torch.zeros_like(logprobs)
    log_ratio = torch.where(mask, logprobs - old_logprobs, zero)
    advantages = torch.where(mask, advantages, zero)
    ratio = log_ratio.exp()
    surrogate = ratio * advantages
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages
    loss = -torch.minimum(surrogate, clipped).sum() / denominator
    with torch.no_grad():
        is_clipped = (clipped < surrogate).to(zero.dtype)
        divergence = torch.expm1(log_ratio) - log_ratio
    return PolicyTerms(loss, is_clipped.sum() / denominator, divergence.sum() / denominator)


def value_loss(
    *,
    values: Float[Tensor, "B A"],
    old_values: Float[Tensor, "B A"],
    returns: Float[Tensor, "B A"],
    mask: Bool[Tensor, "B A"],
    denominator: Denominator,
    clip_eps: float,
) -> ValueTerms:
    """Return the clipped regression loss of the critic.

        V'_t = V_old + clip(V - V_old, -eps, +eps)
        L    = sum_t max((V_t - R_t)^2, (V'_t - R_t)^2) / (2 * denominator)

    The maximum is the pessimistic choice: moving further than eps towards the return earns nothing more. Note
    the factor one half.

    Args:
        values: of the critic being trained.
        old_values: of the critic that the experience came from; no gradient.
        returns: regression target, from unwhitened advantages; no gradient.
        mask: True on response tokens.
        denominator: response tokens of the minibatch.
        clip_eps: half-width of the interval around the old value, above 0.

    Returns:
        Loss and clip fraction.

    Source:
        Huang et al. 2022, "The 37 implementation details of PPO", detail 9; coati's ValueLoss.

    Example:
        >>> one = torch.ones(1, 1)
        >>> value_loss(values=0.5 * one, old_values=0 * one, returns=one, mask=one.bool(), denominator=1,
        ...            clip_eps=0.2).loss  # (0.2 - 1)^2 / 2
        tensor(0.3200)
    """
    zero = torch.zeros_like(values)
    error = torch.where(mask, values - returns, zero)
    clipped_values = old_values + (values - old_values).clamp(-clip_eps, clip_eps)
    clipped_error = torch.where(mask, clipped_values - returns, zero)
    squared, clipped_squared = error.square(), clipped_error.square()
    loss = torch.maximum(squared, clipped_squared).sum() / (2 * denominator)
    is_clipped = (clipped_squared > squared).to(zero.dtype).detach()
    return ValueTerms(loss, is_clipped.sum() / denominator)


def lm_loss(
    *, logprobs: Float[Tensor, "B A"], mask: Bool[Tensor, "B A"], denominator: Denominator
) -> Float[Tensor, ""]:
    """Return the negative log-likelihood of the tokens that the mask counts.

        L = -sum_t log pi(x_t) / denominator

    A token mean over the minibatch: long responses weigh more than short ones.

    Args:
        logprobs: of the model being trained.
        mask: True on the tokens to learn, normally those of the response.
        denominator: such tokens in the minibatch.

    Returns:
        A scalar, in nats per token.

    Example:
        >>> logprobs = torch.tensor([[-1.0, -3.0, -9.0]])
        >>> lm_loss(logprobs=logprobs, mask=logprobs > -5, denominator=2)
        tensor(2.)
    """
    return -masked_sum(logprobs, mask) / denominator


def pairwise_loss(
    *, chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], denominator: Denominator
) -> Float[Tensor, ""]:
    """Return the Bradley-Terry loss of a reward model on preference pairs.

        L = -sum_i log sigmoid(s_chosen - s_rejected) / denominator

    Computed by log-sigmoid, which neither overflows nor loses small losses as log(1 + exp) does.

    Args:
        chosen: scores of the preferred responses.
        rejected: scores of the others.
        denominator: pairs of the minibatch.

    Returns:
        A scalar; log 2 per pair when the scores are equal.

    Source:
        Ouyang et al. 2022, arXiv:2203.02155, equation 1.

    Example:
        >>> pairwise_loss(chosen=torch.zeros(2), rejected=torch.zeros(2), denominator=2)
        tensor(0.6931)
    """
    return -nn_functional.logsigmoid(chosen.float() - rejected.float()).sum() / denominator

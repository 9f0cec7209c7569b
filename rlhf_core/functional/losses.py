"""The losses. Each is a sum over tokens or pairs divided by a denominator that is handed in.

The denominator counts the minibatch of all processes, not the micro-batch at hand, so that the gradients of
micro-batches and processes add up to the gradient of the minibatch. `weights` (functional/weights.py) turn the mean
over tokens into one over sequences.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, assert_never

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as nn_functional

from rlhf_core.functional.moments import masked_sum
from rlhf_core.functional.precision import at_least_float32, out_of_float16

Denominator = int | float | Tensor

_LARGEST_LOG_RATIO = 40.0  # beyond, 0 * inf would make the gradient of clipped tokens NaN

IGNORED = -100
"""The label of a token that no loss is taken of, as transformers and coati write it."""


class PolicyTerms(NamedTuple):
    """The loss to differentiate, and detached diagnostics: two sums over tokens, and a maximum."""

    loss: Tensor
    clipped: Tensor
    """Number of tokens whose gradient a clip cut off."""
    divergence: Tensor
    """Sum of the k3 estimates of KL(pi_old || pi), in nats."""
    max_ratio: Tensor
    """Largest ratio of a counted token's new to its old probability; 0 if nothing counts."""


class ValueTerms(NamedTuple):
    """The loss to differentiate, and a detached diagnostic."""

    loss: Tensor
    clipped: Tensor
    """Number of tokens whose gradient the clip cut off."""


def policy_loss(
    *,
    logprobs: Float[Tensor, "B A"],
    old_logprobs: Float[Tensor, "B A"],
    advantages: Float[Tensor, "B A"],
    mask: Bool[Tensor, "B A"],
    denominator: Denominator,
    clip_eps: float,
    clip_eps_high: float | None = None,
    dual_clip: float | None = None,
    weights: Float[Tensor, "B A"] | None = None,
    importance: Float[Tensor, "B A"] | None = None,
) -> PolicyTerms:
    """Return PPO's clipped surrogate, negated.

        rho_t = exp(log pi - log pi_old)
        J_t   = min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps_high) A_t)
        J_t   = max(J_t, c A_t)  where A_t < 0, with a dual clip c
        L     = -sum_t w_t i_t J_t / denominator

    A token is clipped when a clipped term is the one that counts: then its gradient is zero. Outside the interval
    on the harmless side it is not. The diagnostics carry neither weights nor denominator: divided by the number of
    tokens they are means over tokens, however the loss is aggregated. Log ratios are cut at plus and minus 40, where
    exp is still finite; a guard on `max_ratio` acts long before.

    Args:
        logprobs: of the policy being trained.
        old_logprobs: of the policy that the ratio is measured from; no gradient.
        advantages: whitened or not; no gradient.
        mask: True on response tokens.
        denominator: what the sum is divided by, over the minibatch of all processes: its response tokens for a
            token mean, else what belongs to `weights`.
        clip_eps: half-width of the interval below 1, above 0.
        clip_eps_high: half-width above 1; None takes `clip_eps`.
        dual_clip: bound on the ratio of tokens with a negative advantage, above 1; None sets none.
        weights: w, of each token; None is 1.
        importance: i, a correction for who drew the token; None is 1. No gradient.

    Returns:
        Loss, number of clipped tokens, summed k3 estimates of KL(pi_old || pi), and the largest ratio.

    Raises:
        ValueError: if dual_clip is not above 1.

    Source:
        Schulman et al. 2017, arXiv:1707.06347, equation 7; the upper bound: Yu et al. 2025, arXiv:2503.14476
        (DAPO), section 3.1; the dual clip: Ye et al. 2020, arXiv:1912.09729, equation 5.

    Example:
        >>> ratio = torch.tensor([[1.5, 1.5]])
        >>> gain = torch.tensor([[1.0, -1.0]])
        >>> policy_loss(logprobs=ratio.log(), old_logprobs=0 * ratio, advantages=gain, mask=ratio > 0,
        ...             denominator=2, clip_eps=0.2).loss  # -(1.2 - 1.5) / 2
        tensor(0.1500)
    """
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"expected dual_clip above 1, got {dual_clip}: it bounds the ratio from above")
    logprobs, old_logprobs, advantages = map(out_of_float16, (logprobs, old_logprobs, advantages))
    zero = torch.zeros_like(logprobs)
    log_ratio = torch.where(mask, logprobs - old_logprobs, zero).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    advantages = torch.where(mask, advantages, zero)
    ratio = log_ratio.exp()
    surrogate = ratio * advantages
    upper = clip_eps if clip_eps_high is None else clip_eps_high
    objective = torch.minimum(surrogate, ratio.clamp(1 - clip_eps, 1 + upper) * advantages)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    corrected = objective if importance is None else torch.where(mask, importance, 0.0) * objective
    loss = -_total(corrected, mask, weights) / denominator
    with torch.no_grad():
        is_clipped = _ones(objective != surrogate, zero.dtype)
        divergence = torch.expm1(log_ratio) - log_ratio
        return PolicyTerms(
            loss,
            masked_sum(is_clipped, mask),
            masked_sum(divergence, mask),
            torch.where(mask, ratio, zero).amax() if mask.numel() else zero.sum(),
        )


def value_loss(
    *,
    values: Float[Tensor, "B A"],
    old_values: Float[Tensor, "B A"],
    returns: Float[Tensor, "B A"],
    mask: Bool[Tensor, "B A"],
    denominator: Denominator,
    clip_eps: float,
    weights: Float[Tensor, "B A"] | None = None,
) -> ValueTerms:
    """Return the clipped regression loss of the critic.

        V'_t = V_old + clip(V - V_old, -eps, +eps)
        L    = sum_t w_t max((V_t - R_t)^2, (V'_t - R_t)^2) / (2 * denominator)

    The maximum is the pessimistic choice: moving further than eps towards the return earns nothing more. Note
    the factor one half. `clip_eps` is in the unit of the returns, which nothing rescales.

    Args:
        values: of the critic being trained.
        old_values: of the critic that the experience came from; no gradient.
        returns: regression target, from unwhitened advantages; no gradient.
        mask: True on response tokens.
        denominator: as in `policy_loss`.
        clip_eps: half-width of the interval around the old value, above 0.
        weights: w, of each token; None is 1.

    Returns:
        Loss and number of clipped tokens.

    Source:
        Huang et al. 2022, "The 37 implementation details of PPO", detail 9.

    Example:
        >>> one = torch.ones(1, 1)
        >>> value_loss(values=0.5 * one, old_values=0 * one, returns=one, mask=one.bool(), denominator=1,
        ...            clip_eps=0.2).loss  # (0.2 - 1)^2 / 2
        tensor(0.3200)
    """
    values, old_values, returns = map(out_of_float16, (values, old_values, returns))
    zero = torch.zeros_like(values)
    error = torch.where(mask, values - returns, zero)
    clipped_values = old_values + (values - old_values).clamp(-clip_eps, clip_eps)
    clipped_error = torch.where(mask, clipped_values - returns, zero)
    squared, clipped_squared = error.square(), clipped_error.square()
    loss = _total(torch.maximum(squared, clipped_squared), mask, weights) / (2 * denominator)
    # Within the interval both errors are the same but for rounding, which cuts nothing off.
    is_clipped = _ones((clipped_squared > squared) & ((values - old_values).abs() > clip_eps), zero.dtype)
    return ValueTerms(loss, masked_sum(is_clipped, mask))


def entropy_bonus(
    *,
    entropy: Float[Tensor, "B A"],
    mask: Bool[Tensor, "B A"],
    denominator: Denominator,
    weights: Float[Tensor, "B A"] | None = None,
) -> Float[Tensor, ""]:
    """Return the policy's entropy, aggregated as its loss is; times a coefficient it is subtracted from the loss.

        S = sum_t w_t H_t / denominator

    Args:
        entropy: of the policy at each position, in nats.
        mask: True on response tokens.
        denominator: as in `policy_loss`.
        weights: w, of each token; None is 1.

    Returns:
        A scalar, not negated.

    Source:
        Schulman et al. 2017, arXiv:1707.06347, equation 9.

    Example:
        >>> entropy = torch.tensor([[1.0, 3.0, 9.0]])
        >>> entropy_bonus(entropy=entropy, mask=entropy < 5, denominator=2)
        tensor(2.)
    """
    return _total(entropy, mask, weights) / denominator


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
    *,
    chosen: Float[Tensor, " B"],
    rejected: Float[Tensor, " B"],
    denominator: Denominator,
    margin: Float[Tensor, " B"] | None = None,
    centring: float = 0.0,
    form: Literal["log_sigmoid", "log_exp"] = "log_sigmoid",
) -> Float[Tensor, ""]:
    """Return the Bradley-Terry loss of a reward model on preference pairs.

        d_i = s_chosen - s_rejected - margin_i
        L   = sum_i [-log sigmoid(d_i) + centring * (s_chosen + s_rejected)^2] / denominator

    The two forms are one function, -log sigmoid(d) = log(1 + exp(-d)), written as two papers write it; neither
    overflows or loses small losses, as exp and log one after the other do in half precision.

    Args:
        chosen: scores of the preferred responses.
        rejected: scores of the others.
        denominator: pairs of the minibatch.
        margin: by how much each pair's scores should differ; None is 0.
        centring: weight of the pull of the scores' sum to zero, at least 0.
        form: `log_sigmoid` or `log_exp`.

    Returns:
        A scalar; log 2 per pair when the scores are equal.

    Source:
        Ouyang et al. 2022, arXiv:2203.02155, equation 1 (log_sigmoid); Bai et al. 2022, arXiv:2204.05862, section
        2.3 (log_exp); margin: Touvron et al. 2023, arXiv:2307.09288, equation 2; centring: Eisenstein et al. 2023,
        arXiv:2312.09244.

    Example:
        >>> pairwise_loss(chosen=torch.zeros(2), rejected=torch.zeros(2), denominator=2)
        tensor(0.6931)
    """
    good, bad = at_least_float32(chosen), at_least_float32(rejected)
    difference = good - bad
    if margin is not None:
        difference = difference - margin.to(difference.dtype)
    match form:
        case "log_sigmoid":
            losses = -nn_functional.logsigmoid(difference)
        case "log_exp":
            losses = torch.logaddexp(torch.zeros_like(difference), -difference)
        case _:
            assert_never(form)
    if centring:
        losses = losses + centring * (good + bad).square()
    return losses.sum() / denominator


def _total(
    values: Float[Tensor, "B A"], mask: Bool[Tensor, "B A"], weights: Float[Tensor, "B A"] | None
) -> Float[Tensor, ""]:
    if weights is not None:  # masked before the product: 0 * NaN would be the gradient on padding
        values = torch.where(mask, weights, 0.0) * torch.where(mask, values, 0.0)
    return masked_sum(values, mask)


def _ones(which: Bool[Tensor, "B A"], dtype: torch.dtype) -> Float[Tensor, "B A"]:
    """Return 1 where it is true: in half precision a count beyond 256 or 2,048 would be rounded."""
    return at_least_float32(which.to(dtype))

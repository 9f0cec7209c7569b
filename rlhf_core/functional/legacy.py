"""Upstream's numbers, for comparisons with old runs; ADR 8 says why none of them is a default."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_core.functional.precision import out_of_float16

_LARGEST_SCORE = 5.0


def legacy_token_rewards(
    *,
    scores: Float[Tensor, " B"],
    kl: Float[Tensor, "B A"],
    mask: Bool[Tensor, "B A"],
    kl_coef: float,
) -> Float[Tensor, "B A"]:
    """Return coati's reward of each response token: the clamped score on every one of them.

        r_t = clamp(score, -5, 5) - kl_coef * kl_t

    The return of a response grows with its length, and a verifier's 10 is worth 5. kl is k1 upstream.

    Args:
        scores: one per response.
        kl: k1 estimate of the divergence from the reference at each token, in nats.
        mask: True on response tokens.
        kl_coef: weight of the penalty, per nat, at least 0.

    Returns:
        Rewards; zero on padding.

    Source:
        ColossalChat, `coati.models.utils.compute_reward`.

    Example:
        >>> mask = torch.tensor([[True, True, False]])
        >>> legacy_token_rewards(scores=torch.tensor([10.0]), kl=torch.ones(1, 3), mask=mask, kl_coef=0.5)
        tensor([[4.5000, 4.5000, 0.0000]])
    """
    clamped = scores.clamp(-_LARGEST_SCORE, _LARGEST_SCORE)
    return torch.where(mask, clamped.unsqueeze(1) - kl_coef * kl, torch.zeros_like(kl))


def legacy_sequence_reward(
    *,
    scores: Float[Tensor, " B"],
    logprobs: Float[Tensor, "B A"],
    ref_logprobs: Float[Tensor, "B A"],
    mask: Bool[Tensor, "B A"],
    kl_coef: float,
) -> Float[Tensor, " B"]:
    """Return the detached trainer's reward of each response: one number, which is also its critic's target.

        d_t    = log pi - log pi_ref
        reward = score - kl_coef * mean_t (exp(d_t) - 1 - d_t)

    The mean is over the response's own tokens. The term is k3 with the ratio upside down (k3 of tokens from pi is
    exp(-d) - 1 + d), so that it does not estimate KL(pi || pi_ref); it is still never negative.

    Args:
        scores: one per response; not clamped.
        logprobs: of the policy that drew the tokens.
        ref_logprobs: of the reference policy.
        mask: True on response tokens.
        kl_coef: weight of the penalty, per nat, at least 0.

    Returns:
        Rewards; the score alone for a row without tokens.

    Source:
        ColossalAI's Chat of 2023, `coati.models.utils.compute_reward` and `compute_approx_kl`.

    Example:
        >>> two = torch.full((1, 2), 2.0)
        >>> legacy_sequence_reward(scores=torch.ones(1), logprobs=two.log(), ref_logprobs=0 * two, mask=two > 0,
        ...                        kl_coef=1.0)  # 1 - (2 - 1 - log 2)
        tensor([0.6931])
    """
    logprobs, ref_logprobs = out_of_float16(logprobs), out_of_float16(ref_logprobs)
    difference = torch.where(mask, logprobs - ref_logprobs, torch.zeros_like(logprobs))
    penalty = torch.expm1(difference) - difference
    return scores - kl_coef * penalty.sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def legacy_advantages(
    *, rewards: Float[Tensor, " B"], values: Float[Tensor, "B A"], mask: Bool[Tensor, "B A"]
) -> Float[Tensor, "B A"]:
    """Return the detached trainer's advantage of each response, on every token of it.

        A = reward - mean_t V_t

    One number per response: no credit goes to single tokens, and nothing is whitened. The critic's target is the
    reward itself, so `returns` are it on every token.

    Args:
        rewards: of each response, from `legacy_sequence_reward`.
        values: the critic's; upstream's critic of that time gave the mean over the response.
        mask: True on response tokens.

    Returns:
        Advantages; zero on padding.

    Source:
        ColossalAI's Chat of 2023, `coati.experience_maker.naive`.

    Example:
        >>> values = torch.tensor([[0.0, 1.0, 9.0]])
        >>> legacy_advantages(rewards=torch.ones(1), values=values, mask=values < 5)
        tensor([[0.5000, 0.5000, 0.0000]])
    """
    values = out_of_float16(values)
    zero = torch.zeros_like(values)
    mean = torch.where(mask, values, zero).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    return torch.where(mask, (rewards - mean).unsqueeze(1), zero)

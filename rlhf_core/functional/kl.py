"""Estimators of the divergence between policy and reference, from the sampled tokens alone."""

from __future__ import annotations

from typing import Literal, assert_never

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_core.functional.precision import out_of_float16

KLEstimator = Literal["k1", "k2", "k3"]


def kl(
    *,
    logprobs: Float[Tensor, "B A"],
    ref_logprobs: Float[Tensor, "B A"],
    mask: Bool[Tensor, "B A"],
    estimator: KLEstimator,
) -> Float[Tensor, "B A"]:
    """Return an estimate of KL(pi || pi_ref) at each response token, from the token sampled from pi.

        d  = log pi - log pi_ref
        k1 = d                    unbiased, may be negative
        k2 = d^2 / 2              biased, never negative
        k3 = exp(-d) - 1 + d      unbiased, never negative

    Unbiased as a value, when tokens are drawn from pi at the temperature of the logprobs.

    Args:
        logprobs: of the policy that drew the tokens.
        ref_logprobs: of the reference policy.
        mask: True on response tokens.
        estimator: which of the three.

    Returns:
        Nats per token, in float32 if the logprobs are in float16; zero on padding.

    Source:
        Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.

    Example:
        >>> half, quarter = torch.full((1, 1), 0.5).log(), torch.full((1, 1), 0.25).log()
        >>> kl(logprobs=half, ref_logprobs=quarter, mask=half.bool(), estimator="k1")  # log 2
        tensor([[0.6931]])
    """
    logprobs, ref_logprobs = out_of_float16(logprobs), out_of_float16(ref_logprobs)
    difference = torch.where(mask, logprobs - ref_logprobs, torch.zeros_like(logprobs))
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return torch.expm1(-difference) + difference
        case _:
            assert_never(estimator)

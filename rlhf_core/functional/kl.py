"""Estimators of the divergence between policy and reference, and the coefficient that steers it to a target."""

from __future__ import annotations

from math import isnan
from typing import Literal, assert_never

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_core.functional.precision import out_of_float16

_LARGEST_ERROR = 0.2  # one batch moves the coefficient by at most a fifth
SMALLEST_KL_COEF = 1e-6
"""From far less it would take too many batches to come back."""


def adaptive_kl_coef(kl_coef: float, *, observed_kl: float, target: float, samples: int, horizon: int) -> float:
    """Return the KL coefficient for the next batch, from the divergence of the last one.

        e     = clip((KL - target) / target, -0.2, 0.2)
        coef' = coef * (1 + e * min(samples / horizon, 1)),    at least 1e-6

    A proportional controller in the logarithm of the coefficient. KL is per response, summed over its tokens, as
    the target is. A batch longer than the horizon counts as one horizon: the coefficient moves by a fifth at most.

    Args:
        kl_coef: the coefficient so far, above 0; one below 1e-6 only rises.
        observed_kl: mean divergence of the batch, in nats per response.
        target: what it should be, in nats per response, above 0.
        samples: responses in the batch, at least 0.
        horizon: samples over which the coefficient reacts, at least 1.

    Returns:
        The new coefficient, above 0.

    Raises:
        ValueError: if a number lies outside its range or is NaN.

    Source:
        Ziegler et al. 2019, arXiv:1909.08593, section 2.2; the constant K is there 0.1, here samples / horizon, as in
        their code, where a batch is never as long as the horizon.

    Example:
        >>> adaptive_kl_coef(0.1, observed_kl=6.6, target=6.0, samples=100, horizon=1000)  # e = 0.1
        0.101
    """
    if not kl_coef > 0 or not target > 0 or samples < 0 or horizon < 1 or isnan(observed_kl):
        raise ValueError(
            "expected kl_coef and target above 0, samples of at least 0, a horizon of at least 1 and a KL that is a "
            f"number, got {kl_coef}, {target}, {samples}, {horizon} and {observed_kl}"
        )
    error = min(max((observed_kl - target) / target, -_LARGEST_ERROR), _LARGEST_ERROR)
    return max(min(kl_coef, SMALLEST_KL_COEF), kl_coef * (1 + error * min(samples / horizon, 1.0)))


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

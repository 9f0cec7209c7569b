"""What a token's loss is multiplied by: how tokens become one number, and who drew them."""

from __future__ import annotations

from typing import Literal, assert_never

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_core.functional.precision import out_of_float16

Aggregation = Literal["token_mean", "sequence_mean", "constant_length"]


def aggregation_weights(
    mask: Bool[Tensor, "B A"], *, aggregation: Aggregation, max_tokens: int, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "B A"]:
    """Return the weight of each token in its minibatch's loss, whose sum is divided by `aggregation_count`.

        token_mean       w_t = 1                  over all response tokens: long responses weigh more
        sequence_mean    w_t = 1 / len(row)       over responses: each weighs the same, tokens of long ones less
        constant_length  w_t = 1 / max_tokens     over responses: every token weighs the same in every minibatch

    Args:
        mask: True on response tokens.
        aggregation: which of the three.
        max_tokens: longest response that may be drawn, at least 1; only constant_length reads it.
        dtype: of the weights; float64 where the loss is.

    Returns:
        Weights; zero on padding, so a row without tokens weighs nothing.

    Raises:
        ValueError: if max_tokens is below 1.

    Source:
        token_mean: Yu et al. 2025, arXiv:2503.14476 (DAPO), section 3.3; sequence_mean: Shao et al. 2024,
        arXiv:2402.03300 (GRPO), equation 3; constant_length: Liu et al. 2025, arXiv:2503.20783 (Dr. GRPO).

    Example:
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> aggregation_weights(mask, aggregation="sequence_mean", max_tokens=4)
        tensor([[0.5000, 0.5000],
                [1.0000, 0.0000]])
    """
    if max_tokens < 1:
        raise ValueError(f"expected max_tokens of at least 1, got {max_tokens}")
    counts = mask.to(dtype)
    match aggregation:
        case "token_mean":
            return counts
        case "sequence_mean":
            return counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
        case "constant_length":
            return counts / max_tokens
        case _:
            assert_never(aggregation)


def aggregation_count(mask: Bool[Tensor, "B A"], *, aggregation: Aggregation) -> Float[Tensor, ""]:
    """Return what this part of a minibatch adds to its loss's denominator.

        token_mean       its response tokens
        sequence_mean    its responses that have tokens: one without any is neither in the sum nor in the count
        constant_length  the same

    Added over micro-batches and processes it is the denominator of all losses of the minibatch.

    Args:
        mask: True on response tokens.
        aggregation: which of the three.

    Returns:
        A scalar in float32.

    Source:
        As `aggregation_weights`.

    Example:
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> aggregation_count(mask, aggregation="token_mean"), aggregation_count(mask, aggregation="sequence_mean")
        (tensor(3.), tensor(2.))
    """
    return (mask if aggregation == "token_mean" else mask.any(dim=1)).sum().float()


def importance_weights(
    *,
    logprobs: Float[Tensor, "B A"],
    behaviour_logprobs: Float[Tensor, "B A"],
    mask: Bool[Tensor, "B A"],
    cap: float,
) -> Float[Tensor, "B A"]:
    """Return truncated importance weights of each token: how much likelier a policy finds it than who drew it.

        i_t = min(exp(log pi - log mu), cap)

    Per token, not the product over the response: biased, but of bounded variance. Truncated from above only.
    With pi the policy that PPO's ratio is measured from, `policy_loss(importance=...)` is the decoupled objective
    (ratio to the proximal policy, weight from the behaviour policy) or, where both are the same weights in two
    kinds of arithmetic, the truncated correction of that difference.

    Args:
        logprobs: log pi, of the policy that the ratio is measured from.
        behaviour_logprobs: log mu, as the generating engine drew the tokens.
        mask: True on response tokens.
        cap: largest weight, above 0.

    Returns:
        Weights without a gradient; zero on padding.

    Raises:
        ValueError: if the cap is not above 0.

    Source:
        Hilton et al. 2021, arXiv:2110.00641 (decoupled objective), equation 2; Espeholt et al. 2018,
        arXiv:1802.01561 (truncation, section 4.1).

    Example:
        >>> half, tenth = torch.full((1, 1), 0.5).log(), torch.full((1, 1), 0.1).log()
        >>> importance_weights(logprobs=half, behaviour_logprobs=tenth, mask=half.bool(), cap=2.0)
        tensor([[2.]])
    """
    if not cap > 0:
        raise ValueError(f"expected a cap above 0, got {cap}")
    with torch.no_grad():
        log_weights = out_of_float16(logprobs) - out_of_float16(behaviour_logprobs)
        weights = log_weights.exp().clamp(max=cap)
        return torch.where(mask, weights, torch.zeros_like(weights))

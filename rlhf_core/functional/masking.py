"""Statistics over the tokens that a mask counts."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

_EPSILON = 1e-8  # keeps the whitening of equal values at zero


def masked_sum(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Return the sum of the values that the mask counts.

        sum_i m_i x_i

    What lies where the mask is False is never read, so it may be NaN.

    Args:
        values: any float tensor.
        mask: True where a value counts.

    Returns:
        A scalar; zero if nothing counts.

    Example:
        >>> masked_sum(torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([True, True, False]))
        tensor(3.)
    """
    return torch.where(mask, values, torch.zeros_like(values)).sum()


def masked_mean(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Return the mean of the values that the mask counts.

        sum_i m_i x_i / sum_i m_i

    Over all counted tokens at once, not first over each row: a long row weighs more than a short one.

    Args:
        values: any float tensor.
        mask: True where a value counts.

    Returns:
        A scalar; zero if nothing counts.

    Example:
        >>> masked_mean(torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False]))
        tensor(2.)
    """
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def masked_whiten(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the values moved and scaled to mean 0 and variance 1 over what the mask counts.

        (x - mean(x)) / sqrt(var(x) + 1e-8)

    The variance divides by the number of counted values, not by one less. Mean and variance are over all
    counted values at once, not per row.

    Args:
        values: any float tensor.
        mask: True where a value counts.

    Returns:
        Whitened values; zero where the mask is False, and everywhere if all counted values are equal.

    Source:
        Advantage normalisation as in Andrychowicz et al. 2021, arXiv:2006.05990, section 3.3.

    Example:
        >>> masked_whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
        tensor([-1.,  1.,  0.])
    """
    centred = torch.where(mask, values - masked_mean(values, mask), torch.zeros_like(values))
    variance = masked_mean(centred.square(), mask)
    return centred * torch.rsqrt(variance + _EPSILON)

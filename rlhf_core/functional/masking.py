"""Statistics over the tokens that a mask counts."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


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

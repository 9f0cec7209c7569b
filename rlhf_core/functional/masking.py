"""Statistics over the tokens that a mask counts."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_core.functional.precision import out_of_float16

IGNORED = -100
"""The label of a token that no loss is taken of, as transformers and coati write it."""


def masked_sum(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Return the sum of the values that the mask counts.

        sum_i m_i x_i

    What lies where the mask is False is never read, so it may be NaN.

    Args:
        values: any float tensor.
        mask: True where a value counts.

    Returns:
        A scalar, in float32 if the values are in float16; zero if nothing counts.

    Example:
        >>> masked_sum(torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([True, True, False]))
        tensor(3.)
    """
    values = out_of_float16(values)
    return torch.where(mask, values, torch.zeros_like(values)).sum()

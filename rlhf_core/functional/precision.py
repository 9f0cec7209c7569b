"""The dtype in which numbers are computed when their own dtype is too narrow."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def at_least_float32(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return half-precision numbers in float32; float32 and float64 stay as they are.

    For what needs more digits than a half has.

    Args:
        values: any float tensor.

    Returns:
        The same numbers.

    Example:
        >>> at_least_float32(torch.ones(1).bfloat16()).dtype, at_least_float32(torch.ones(1).double()).dtype
        (torch.float32, torch.float64)
    """
    return values.to(torch.promote_types(values.dtype, torch.float32))


def out_of_float16(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return float16 numbers in float32; all others stay as they are.

    For what needs more range. float16 ends at 65,504: exp of 11.1, the square of 256 and a sum over a long minibatch
    are infinite in it, and 0 times infinity in a backward pass is not a number. bfloat16 reaches as far as float32.

    Args:
        values: any float tensor.

    Returns:
        The same numbers.

    Example:
        >>> out_of_float16(torch.full((1,), 12.0).half()).exp()
        tensor([162754.7969])
    """
    return values.float() if values.dtype == torch.float16 else values

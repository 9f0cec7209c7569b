"""Sums, means and variances of what a mask counts, over several processes: each adds up its own, the sums are added."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_core.functional.precision import out_of_float16

_ROUNDING = 1e-11  # square of about 26 roundings of a float32: sums over a long response differ by as much
_EPSILON = 1e-8  # keeps the whitening of equal values at zero


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


class MaskedSums(NamedTuple):
    """What one process adds to a mean over all of them; both are scalars of the dtype that `masked_sum` returns."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count, as meant
    total: Tensor


class Moments(NamedTuple):
    """Number, mean and variance of the values that a mask counts; scalars of the values' dtype."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count, as meant
    mean: Tensor
    variance: Tensor
    """Mean squared deviation: divided by the count, not by one less."""


def masked_sums(values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> MaskedSums:
    """Return how many values the mask counts, and their sum.

        n = sum_i m_i,    s = sum_i m_i x_i

    Both add up over processes: the mean over all of them is (sum of s) / (sum of n). Handed float64, they are exact for
    equal float32 numbers, as their mean must be.

    Args:
        values: any float tensor.
        mask: True where a value counts.

    Returns:
        Count and sum; both zero if nothing counts.

    Example:
        >>> masked_sums(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
        MaskedSums(count=tensor(2.), total=tensor(4.))
    """
    total = masked_sum(values, mask)
    return MaskedSums(mask.sum().to(total.dtype), total)


def deviation_sum(
    values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], *, mean: float | Float[Tensor, ""]
) -> Float[Tensor, ""]:
    """Return the summed squared deviations from a mean that is handed in.

        sum_i m_i (x_i - mean)^2

    The second of two passes: the first adds `masked_sums` over the processes and divides; this one adds up too,
    and divided by the count of all it is the variance over all. Sums of squares, which one pass would give, lose
    the variance of values far from zero.

    Args:
        values: any float tensor.
        mask: True where a value counts.
        mean: of the values of all processes.

    Returns:
        A scalar; zero if nothing counts.

    Example:
        >>> deviation_sum(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]), mean=2.0)
        tensor(2.)
    """
    centred = out_of_float16(values) - mean
    return torch.where(mask, centred, torch.zeros_like(centred)).square().sum()


def whiten_with(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    *,
    mean: float | Float[Tensor, ""],
    variance: float | Float[Tensor, ""],
) -> Float[Tensor, "*shape"]:
    """Return the values moved and scaled by a mean and a variance that are handed in.

        (x - mean) / sqrt(variance + 1e-8)

    With the moments of the minibatch of all processes, every process whitens its own share as one process would
    whiten all of it.

    Args:
        values: any float tensor.
        mask: True where a value counts.
        mean: of all values, wherever they are.
        variance: mean squared deviation of all values, at least 0.

    Returns:
        Whitened values, computed in float64; zero where the mask is False, and everywhere if the values do not vary
        (`varies`): what rounding left would be blown up.

    Source:
        Advantage normalisation as in Andrychowicz et al. 2021, arXiv:2006.05990, section 3.3.

    Example:
        >>> whiten_with(torch.tensor([1.0, 9.0]), torch.tensor([True, False]), mean=3.0, variance=4.0)
        tensor([-1.,  0.])
    """
    doubles = values.double()  # a mean in float32 would be off by a rounding, which a small variance blows up
    mean, variance = (torch.as_tensor(x, dtype=torch.float64, device=values.device) for x in (mean, variance))
    counts = mask & varies(variance=variance, square=variance + mean.square())
    centred = torch.where(counts, doubles - mean, torch.zeros_like(doubles))
    return (centred / (variance + _EPSILON).sqrt()).to(values.dtype)


def varies(*, variance: Float[Tensor, "*shape"], square: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """Return whether float32 numbers of this variance differ by more than their rounding.

        variance > 1e-11 * mean(x^2)

    Rounding is relative: what is a difference between numbers around 1 is none between numbers around 1000. Whatever
    is divided by a deviation asks this first.

    Args:
        variance: mean squared deviation of the numbers.
        square: their mean square, which is the variance and the square of the mean.

    Returns:
        Of their shape; False for equal numbers, True for what is no number, so that dividing hides nothing.

    Example:
        >>> varies(variance=torch.tensor(1e-8), square=torch.tensor(1.0)).item()
        True
        >>> varies(variance=torch.tensor(1e-8), square=torch.tensor(1e6)).item()
        False
    """
    return ~(variance <= _ROUNDING * square)


class RunningMoments(NamedTuple):
    """Count, mean and summed squared deviation of all values seen so far; plain numbers, ready for JSON.

    n' = n + k,    d = mean(x) - mean
    mean' = mean + d k / n'
    m2'   = m2 + sum_i (x_i - mean(x))^2 + d^2 n k / n'

    Source:
        Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance"; Welford 1962 for k = 1.

    Example:
        >>> RunningMoments().updated(torch.tensor([1.0])).updated(torch.tensor([4.0, 4.0]))
        RunningMoments(count=3, mean=3.0, m2=6.0)
    """

    count: int = 0  # type: ignore[assignment]
    mean: float = 0.0
    m2: float = 0.0

    def updated(self, values: Float[Tensor, " N"]) -> RunningMoments:
        """Return the moments after these values too; the same ones if there are none.

        Computed in float64: sums over a whole run outgrow float32.

        Raises:
            ValueError: if a value is not finite, which would spoil all that follows.
        """
        new = values.detach().double().cpu()
        if not bool(torch.isfinite(new).all()):
            raise ValueError(f"expected finite values for running moments, got {values.tolist()}")
        k = new.numel()
        if not k:
            return self
        count = self.count + k
        mean = new.mean().item()
        shift = mean - self.mean
        m2 = self.m2 + (new - mean).square().sum().item() + shift * shift * self.count * k / count
        return RunningMoments(count, self.mean + shift * k / count, m2)

    @property
    def std(self) -> float:
        """Root of the mean squared deviation; 1 while the values do not vary, as there is nothing to divide by.

        Example:
            >>> RunningMoments(count=2, mean=0.1, m2=1e-33).std
            1.0
        """
        variance = self.m2 / max(self.count, 1)
        square = variance + self.mean * self.mean
        return sqrt(variance) if variance > _ROUNDING * square else 1.0  # as `varies`, for plain numbers

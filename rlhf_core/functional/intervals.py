"""Confidence intervals for the gate and for reports; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist
from typing import NamedTuple


class Interval(NamedTuple):
    """An estimate and the ends of its confidence interval."""

    estimate: float
    low: float
    high: float


def wilson_interval(successes: int, n: int, confidence: float) -> Interval:
    """Return the share of successes with Wilson's score interval.

        centre = (p + z^2 / 2n) / (1 + z^2 / n)
        half   = z / (1 + z^2 / n) * sqrt(p (1 - p) / n + z^2 / 4n^2)

    Two-sided. The estimate is the plain share p, which is not the centre of the interval; the ends stay
    within [0, 1], and the interval has a width even at 0 or n successes.

    Args:
        successes: between 0 and n.
        n: number of trials, at least 1.
        confidence: in (0, 1), say 0.95.

    Returns:
        The share and its interval.

    Raises:
        ValueError: if a number lies outside its range.

    Source:
        Wilson 1927, "Probable inference, the law of succession, and statistical inference", JASA 22.

    Example:
        >>> [round(end, 3) for end in wilson_interval(213, 400, 0.95)]
        [0.532, 0.484, 0.581]
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"expected 0 <= successes <= n with n at least 1, got {successes} of {n}")
    z = _quantile(confidence)
    share = successes / n
    scale = 1 + z * z / n
    centre = (share + z * z / (2 * n)) / scale
    half = z / scale * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # At 0 or n successes the ends are 0 and 1 exactly, which rounding may miss.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return Interval(share, low, high)


def normal_interval(*, mean: float, std: float, n: int, confidence: float) -> Interval:
    """Return a mean with its normal interval, from the figures of its sample.

        half = z * std / sqrt(n)

    Good for dozens of values that were drawn apart, optimistic for a handful, or where several share a prompt; equal
    values have no width.

    Args:
        mean: of the values.
        std: of the values, by n - 1; at least 0.
        n: number of values, at least 2.
        confidence: in (0, 1), say 0.95.

    Returns:
        The mean and its interval.

    Raises:
        ValueError: if a number lies outside its range.

    Source:
        The large-sample interval for a mean, by the central limit theorem.

    Example:
        >>> [round(end, 3) for end in normal_interval(mean=2.0, std=5.0, n=100, confidence=0.95)]
        [2.0, 1.02, 2.98]
    """
    if n < 2 or std < 0:  # noqa: PLR2004 - a standard deviation needs two
        raise ValueError(f"expected at least 2 values and a standard deviation of at least 0, got {n} and {std}")
    half = _quantile(confidence) * std / sqrt(n)
    return Interval(mean, mean - half, mean + half)


def mean_interval(values: Sequence[float], confidence: float) -> Interval:
    """Return the mean with its normal interval.

        half = z * sqrt(sum_i (x_i - mean(x))^2 / (n - 1) / n)

    Good for dozens of values, optimistic for a handful; equal values have no width.

    Args:
        values: at least two.
        confidence: in (0, 1), say 0.95.

    Returns:
        The mean and its interval.

    Raises:
        ValueError: if there are fewer than two values, or confidence is not in (0, 1).

    Source:
        The large-sample interval for a mean, by the central limit theorem.

    Example:
        >>> [round(end, 3) for end in mean_interval([1.0, 3.0], 0.95)]
        [2.0, 0.04, 3.96]
    """
    n = len(values)
    if n < 2:  # noqa: PLR2004 - a variance needs two
        raise ValueError(f"expected at least 2 values, got {n}")
    mean = sum(values) / n
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    return normal_interval(mean=mean, std=sqrt(variance), n=n, confidence=confidence)


def paired_difference_interval(
    before: Sequence[bool] | Sequence[float], after: Sequence[bool] | Sequence[float], confidence: float
) -> Interval:
    """Return the mean gain from `before` to `after` on the same problems, with its normal interval.

        d_i  = after_i - before_i                       (of outcomes right and wrong: -1, 0 or 1)
        half = z * sqrt(sum_i (d_i - mean(d))^2 / (n - 1) / n)

    Paired: problem i is the same in both, so problems that both get right or both get wrong widen nothing,
    and the interval is narrower than that of two independent shares. Normal approximation: good for dozens of
    problems on which the two differ, optimistic for a handful; with no variation among the differences the
    width is zero. The ends are not cut at -1 and 1.

    Args:
        before: outcome or score of each problem for the first policy.
        after: the same for the second, in the same order.
        confidence: in (0, 1), say 0.95.

    Returns:
        The mean difference and its interval; positive when `after` is better.

    Raises:
        ValueError: if the lengths differ, there are fewer than two problems, or confidence is not in (0, 1).

    Source:
        The large-sample interval for a mean of paired differences; Agresti 2013, "Categorical data analysis",
        section 11.1.

    Example:
        >>> paired_difference_interval([True, False], [True, True], 0.95).estimate
        0.5
    """
    if len(before) != len(after):
        raise ValueError(f"expected outcomes of the same problems, got {len(before)} before and {len(after)} after")
    n = len(before)
    if n < 2:  # noqa: PLR2004 - a variance needs two
        raise ValueError(f"expected at least 2 problems to compare, got {n}")
    return mean_interval([float(b) - float(a) for a, b in zip(before, after, strict=True)], confidence)


def _quantile(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"expected a confidence between 0 and 1, got {confidence}")
    return NormalDist().inv_cdf((1 + confidence) / 2)

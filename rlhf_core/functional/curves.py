"""Has a curve become flat? Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple, TypeVar

T = TypeVar("T")

FLAT = 0.05
"""A curve that changes by less than this share over its last quarter is flat, unless its scatter could hide more."""
_SURE = 2  # standard errors: a change within them may be noise
_FEWEST = 4  # steps of a quarter: fewer say nothing of a noisy curve


class Fall(NamedTuple):
    """By how much a curve falls, relative to its level."""

    relative: float
    """Negative if it rises."""
    error: float
    """Standard error of it: what the scatter around the line makes of it by chance."""

    @property
    def word(self) -> str:
        """`falling` or `rising`, of a change from `FLAT` on that its scatter does not explain; `flat`, of one below.

        Where the scatter could hide a change, or be taken for one, there is no clear trend: neither is said.

        Example:
            >>> Fall(0.2, 0.05).word, Fall(-0.2, 0.05).word, Fall(0.02, 0.01).word
            ('falling', 'rising', 'flat')
            >>> Fall(0.524, 0.3).word, Fall(0.02, 0.3).word
            ('without a clear trend', 'without a clear trend')
        """
        if abs(self.relative) < FLAT:
            return "flat" if self.error < FLAT else "without a clear trend"
        if abs(self.relative) <= _SURE * self.error:
            return "without a clear trend"
        return "falling" if self.relative > 0 else "rising"


def last_quarter(values: Sequence[T]) -> Sequence[T]:
    """Return the last quarter of a curve, rounded up: at least four values, or all of fewer.

    Example:
        >>> last_quarter(range(18)), last_quarter([7, 8])
        (range(13, 18), [7, 8])
    """
    return values[-max(_FEWEST, -(-len(values) // 4)) :]


def relative_fall(values: Sequence[float]) -> Fall:
    """Return by how much a curve falls from the first to the last of its values, on the line that fits them best.

        b     = sum_i (t_i - mean t) (x_i - mean x) / sum_i (t_i - mean t)^2,    t_i = 0 .. n - 1
        fall  = -b (n - 1) / mean x
        error = (n - 1) / mean x * sqrt(sum_i (x_i - line_i)^2 / (n - 2) / sum_i (t_i - mean t)^2)

    Least squares; errors of the values are taken as independent. A learning rate that decays to zero makes any curve
    flat: flat says that the run came to rest, not that more data would teach nothing.

    Args:
        values: of equal distance, such as losses of the last steps; at least three, none below 0.

    Returns:
        The relative fall and its standard error; both zero for a curve of zeros.

    Raises:
        ValueError: if there are fewer than three values, or one is below 0.

    Source:
        Simple linear regression; Montgomery, Peck and Vining 2012, "Introduction to linear regression analysis",
        section 2.2.

    Example:
        >>> relative_fall([4.0, 3.0, 2.0])  # falls by 2 at a level of 3
        Fall(relative=0.6666666666666666, error=0.0)
    """
    n = len(values)
    if n < 3 or min(values) < 0:  # noqa: PLR2004 - two fit any line, and leave no scatter
        raise ValueError(f"expected at least 3 values, none below 0, got {n}, the smallest {min(values, default=None)}")
    level, middle = sum(values) / n, (n - 1) / 2
    if level == 0:
        return Fall(0.0, 0.0)
    spread = sum((t - middle) ** 2 for t in range(n))
    slope = sum((t - middle) * (value - level) for t, value in enumerate(values)) / spread
    scatter = sum((value - level - slope * (t - middle)) ** 2 for t, value in enumerate(values)) / (n - 2)
    return Fall(-slope * (n - 1) / level, (n - 1) / level * sqrt(scatter / spread))

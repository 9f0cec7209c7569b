"""Several sources in one order."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def mixed_order(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return whose turn it is, turn after turn, until the source whose turn it is has no row left.

    After every turn each source has had its share of the turns to within one row, and to within 1/2 with two
    sources. Of those that lag behind, the one that would first lag by too much comes next.

    Args:
        sizes: rows of each source.
        weights: shares, greater than 0, of any sum.

    Source:
        Tijdeman 1980, The chairman assignment problem, Discrete Mathematics 32.

    Example:
        >>> mixed_order([10, 2], [3.0, 1.0])
        [0, 0, 1, 0, 0, 0, 1, 0, 0, 0]
    """
    if len(sizes) == 1:
        return [0] * sizes[0]
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [share / sum(exact) for share in exact]
    slack = Fraction(1, 2 * len(sizes) - 2)
    taken = [0] * len(sizes)
    order: list[int] = []
    while True:
        lags = [share * (len(order) + 1) - count for share, count in zip(shares, taken, strict=True)]
        due = [source for source, lag in enumerate(lags) if lag >= slack]
        chosen = min(due, key=lambda source: (1 - slack - lags[source]) / shares[source])
        if taken[chosen] == sizes[chosen]:
            return order
        taken[chosen] += 1
        order.append(chosen)

"""The error of a year, spent over its comparisons. Needs no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

YEAR = timedelta(days=365)


class Comparison(NamedTuple):
    """One evening of the gate: when, and what its configuration allowed then."""

    when: datetime
    year_error: float
    """Probability that any promotion of a year is due to chance, at most."""
    nights_a_year: int
    """Comparisons that share it evenly."""


def levels(comparisons: Iterable[Comparison]) -> list[float]:
    """Return at which level each comparison may test, from those before it.

        level_i = min(year_error / nights_a_year, left_i / 2)
        left_i  = year_error - sum of the levels of the 365 days before i

    A promotion by chance has at most the level's probability in each comparison, so by the union bound at most
    `year_error` in any 365 days, whatever the comparisons have in common. Where there are more of them than
    `nights_a_year`, each has half of what is left: none is free, and none is without hope.

    Args:
        comparisons: against one name's champions, in the order in which they were made.

    Returns:
        Levels from 0 to 1, in the same order; all that the tests of a comparison may spend together.

    Source:
        The union bound (Bonferroni), with weights.

    Example:
        >>> levels([Comparison(datetime(2026, 1, day), 0.25, 2) for day in (1, 2, 3)])
        [0.125, 0.0625, 0.03125]
    """
    spent: deque[tuple[datetime, float]] = deque()
    found = []
    for each in comparisons:
        while spent and each.when - spent[0][0] >= YEAR:
            spent.popleft()
        left = max(0.0, each.year_error - sum(level for _, level in spent))
        found.append(min(each.year_error / each.nights_a_year, left / 2))
        spent.append((each.when, found[-1]))
    return found

"""Which gains a night's problems can show: told before the night. Needs no torch."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, log2, sqrt
from statistics import NormalDist

from rlhf_core.gating.paired_test import Tally, chances, sign_test

CHANCE = 0.8
"""A gain counts as seen where the test finds it with this probability."""
DIFFERING = 0.3
"""Share of problems on which two policies differ, where it is not known: the upper end of what nights show."""
MOST_PROBLEMS = 20_000
_STEPS = 20


def fewest_problems(level: float) -> int:
    """Return the number of problems below which no outcome passes: all of them wins, and p above the level.

    Example:
        >>> fewest_problems(0.05 / 365)  # 1 / 2^12 is 0.00024, 1 / 2^13 is 0.00012
        13
    """
    return ceil(-log2(level)) if level > 0 else MOST_PROBLEMS


def power(*, problems: int, gain: float, differing: float, level: float) -> float:
    """Return the probability that the sign test passes.

        sum_m P(Bin(problems, differing) = m) P(Bin(m, q) >= c(m)),  q = (differing + gain) / (2 differing)

    where c(m) is the fewest wins of m that pass.

    Args:
        problems: of the comparison, at least 1.
        gain: share of wins minus share of losses, in truth.
        differing: share of problems on which the two differ, in truth: at least the gain, at most 1.
        level: of the test, in (0, 1).

    Source:
        Agresti 2013, "Categorical data analysis", section 11.1.
    """
    share = (differing + gain) / (2 * differing)
    total = 0.0
    for m, chance in enumerate(chances(problems, differing)):
        if chance > 1e-9:  # noqa: PLR2004 - what is left out changes no digit that is shown
            total += chance * sum(chances(m, share)[_wins_needed(m, level) :])
    return total


def smallest_gain(problems: int, level: float, differing: float = DIFFERING) -> float | None:
    """Return the least gain that is seen with the probability CHANCE; None if none is."""
    if power(problems=problems, gain=differing, differing=differing, level=level) < CHANCE:
        return None
    low, high = 0.0, differing
    for _ in range(_STEPS):
        middle = (low + high) / 2
        is_seen = power(problems=problems, gain=middle, differing=differing, level=level) >= CHANCE
        low, high = (low, middle) if is_seen else (middle, high)
    return high


def problems_needed(gain: float, level: float, differing: float = DIFFERING) -> int:
    """Return about how many problems show a gain with the probability CHANCE; by the normal approximation.

    n = ((z_level sqrt(differing) + z_chance sqrt(differing - gain^2)) / gain)^2
    """
    wanted = _z(level) * sqrt(differing) + _z(1 - CHANCE) * sqrt(differing - gain**2)
    return ceil((wanted / gain) ** 2)


def chance_to_pass(found: Tally, level: float, more: int) -> float:
    """Return about how likely a test passes after more problems, if wins and losses go on at the rates seen so far.

    By the normal approximation; no promise depends on it, as it only says whom another night may be worth.

    Args:
        found: the outcomes so far.
        level: of the test at the end, in (0, 1).
        more: problems that are still to come, at least 1.
    """
    if found.problems == 0 or found.wins <= found.losses:
        return 0.0
    differing, gain = (found.wins + found.losses) / found.problems, found.gain
    needed = _z(level) * sqrt((found.problems + more) * differing)
    spread = sqrt(more * max(differing - gain**2, 1 / found.problems))
    return NormalDist().cdf((found.wins - found.losses + more * gain - needed) / spread)


@lru_cache(maxsize=65536)
def _wins_needed(differing: int, level: float) -> int:
    """Return the fewest wins of so many differing problems that pass; one more than there are if none do."""
    low, high = differing // 2, differing + 1
    while low < high:
        middle = (low + high) // 2
        is_enough = sign_test(middle, differing - middle) <= level
        low, high = (low, middle) if is_enough else (middle + 1, high)
    return low


@lru_cache(maxsize=1024)
def _z(level: float) -> float:
    return -NormalDist().inv_cdf(level)

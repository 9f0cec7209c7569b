"""Which gains a night's problems can show: told before the night. Needs no torch."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, log, sqrt
from statistics import NormalDist

from rlhf_core.gating.paired_test import Tally, chances, improvement_p, sign_test

CHANCE = 0.8
"""A gain counts as seen where the test finds it with this probability."""
DIFFERING = 0.3
"""Share of problems on which two policies differ, where it is not known: the upper end of what nights show."""
MOST_PROBLEMS = 20_000
_STEPS = 20


def fewest_problems(level: float, min_gain: float = 0.0) -> int:
    """Return the number of problems below which no outcome passes: all of them wins, and p above the level.

    Of n wins, `improvement_p` is 2 ((1 + min_gain) / 2)^n, and half of it where `min_gain` is 0.

    Args:
        level: of the test, at most 1; at 0 or below nothing passes.
        min_gain: that the gain must be shown to exceed.

    Example:
        >>> fewest_problems(0.05 / 365)  # 1 / 2^12 is 0.00024, 1 / 2^13 is 0.00012
        13
        >>> fewest_problems(0.05 / 365, 0.2)  # 2 * 0.6^18 is 0.00020, 2 * 0.6^19 is 0.00012
        19
    """
    share = (1 + min_gain) / 2
    if level <= 0 or share >= 1:
        return MOST_PROBLEMS
    if share <= 0:
        return 1
    return max(1, ceil(log(level / 2 if min_gain else level) / log(share)))


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


def smallest_gain(problems: int, level: float, differing: float = DIFFERING, *, min_gain: float = 0.0) -> float | None:
    """Return the least gain that is seen with the probability CHANCE; None if none is.

    With a `min_gain` other than 0, of what is told to be above it, and about.

    Args:
        problems: of the comparison, at least 1.
        level: of the test, in (0, 1).
        differing: share of problems on which two policies differ.
        min_gain: that the gain must be shown to exceed.
    """

    def is_seen(gain: float) -> bool:
        if min_gain:
            return _shows(problems, gain, differing, level, min_gain)
        return power(problems=problems, gain=gain, differing=differing, level=level) >= CHANCE

    if not is_seen(differing):
        return None
    low, high = max(min_gain, -differing), differing
    for _ in range(_STEPS // 2 if min_gain else _STEPS):  # the other test takes a thousand times as long
        middle = (low + high) / 2
        low, high = (low, middle) if is_seen(middle) else (middle, high)
    return high


def _shows(problems: int, gain: float, differing: float, level: float, min_gain: float) -> bool:
    """Return whether the test passes at the outcome that is worse, by the normal approximation, than CHANCE of all."""
    unlucky = gain - _z(1 - CHANCE) * sqrt(max(0.0, differing - gain**2) / problems)
    unlucky = max(unlucky, -differing)
    wins, losses = (round(problems * (differing + sign * unlucky) / 2) for sign in (1, -1))
    return improvement_p(Tally(wins, losses, problems), min_gain) <= level


def problems_needed(gain: float, level: float, differing: float = DIFFERING) -> int:
    """Return about how many problems show a gain with the probability CHANCE; by the normal approximation.

    n = ((z_level sqrt(differing) + z_chance sqrt(differing - gain^2)) / gain)^2
    """
    wanted = _z(level) * sqrt(differing) + _z(1 - CHANCE) * sqrt(differing - gain**2)
    return ceil((wanted / gain) ** 2)


def problems_to_pass(problems: int, p_value: float, level: float) -> int | None:
    """Return about how many problems pass with the probability CHANCE, if the gain is what was seen.

    n = problems ((z_level + z_chance) / z_p)^2, as a gain's z grows with the root of the problems. None where that is
    above MOST_PROBLEMS, or there is no gain.

    Args:
        problems: of the comparison.
        p_value: of its test.
        level: that the test has to reach, in (0, 1).
    """
    if not 0 < p_value < 0.5:  # noqa: PLR2004 - from there on the policy is not the better one
        return None
    needed = ceil(problems * ((_z(level) + _z(1 - CHANCE)) / _z(p_value)) ** 2)
    return needed if needed <= MOST_PROBLEMS else None


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

"""Exact one-sided tests of a policy against another on the same problems, and of several at once. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import exp, fsum, lgamma, log, log1p
from typing import NamedTuple

_STEPS = 60
"""Of a bisection of a range of about 1: more change no digit of a double."""


class Tally(NamedTuple):
    """How two policies did on the same problems."""

    wins: int
    """Problems on which the new policy did better."""
    losses: int
    """Problems on which it did worse."""
    problems: int
    """All of them, those without a difference too."""

    @property
    def gain(self) -> float:
        """Share of wins minus share of losses, from -1 to 1; 0 without a problem."""
        return (self.wins - self.losses) / self.problems if self.problems else 0.0


def tally(before: Mapping[str, float], after: Mapping[str, float], margin: float = 0.0) -> Tally:
    """Return on how many problems a policy did better than another, and on how many worse.

    Args:
        before: score by problem of the policy that is to be beaten.
        after: the same of the new policy.
        margin: a difference must exceed it to be a win, and is a loss below it; 0 where scores are right or wrong.

    Raises:
        ValueError: the problems are not the same.
    """
    if before.keys() != after.keys():
        raise ValueError(f"expected outcomes of the same problems, got {len(before)} before and {len(after)} after")
    differences = [after[key] - before[key] for key in before]
    wins = sum(each > margin for each in differences)
    return Tally(wins, sum(each < margin for each in differences), len(differences))


@lru_cache(maxsize=65536)
def sign_test(wins: int, losses: int) -> float:
    """Return the exact p-value of the null that a difference is as often a loss as a win, or more often.

        p = P(X >= wins),  X ~ Bin(wins + losses, 1/2)

    Given that two policies differ on a problem, it is a win with probability 1/2 at most under the null, so this is
    exact however many problems both get right or wrong, and whatever the distribution of scores. One-sided.

    Args:
        wins: at least 0.
        losses: at least 0.

    Returns:
        From 0 to 1; 1 where nothing differs.

    Raises:
        ValueError: a number is negative.

    Source:
        McNemar 1947, "Note on the sampling error of the difference between correlated proportions", in its exact form.

    Example:
        >>> sign_test(4, 0)  # 1 / 2^4
        0.0625
    """
    if wins < 0 or losses < 0:
        raise ValueError(f"expected numbers of problems, got {wins} wins and {losses} losses")
    n, fewer = wins + losses, min(wins - 1, losses)
    # the shorter tail is summed, in whole numbers: P(X >= wins) = P(X <= losses) = 1 - P(X <= wins - 1)
    term, total = 1, 0
    for k in range(fewer + 1):
        total += term
        term = term * (n - k) // (k + 1)
    tail = total if fewer == losses else 2**n - total
    return float(Fraction(tail, 2**n))


def improvement_p(found: Tally, min_gain: float = 0.0) -> float:
    """Return the p-value of the null that the true gain is at most `min_gain`.

    With `min_gain` 0 it is the sign test. Else the gain is the share of wins minus that of losses, and the null is
    refused at level a where Clopper and Pearson's bounds, each at a / 2, leave a difference above `min_gain`:

        p = 2 min_t max( P(Bin(n, t + min_gain) >= wins), P(Bin(n, t) <= losses) )

    Valid for every number of problems, and conservative.

    Args:
        found: the outcomes.
        min_gain: from -1 to 1, in shares of problems.

    Returns:
        From 0 to 1.

    Source:
        Clopper and Pearson 1934, "The use of confidence or fiducial limits"; the two sides by the union bound.
    """
    if min_gain == 0:
        return sign_test(found.wins, found.losses)
    low, high, n = 0.0, 1.0, found.problems
    for _ in range(_STEPS):
        middle = (low + high) / 2
        # the first tail rises with the share of losses, the second falls: the least of their maximum is where they meet
        if _at_least(found.wins, n, middle + min_gain) < _at_most(found.losses, n, middle):
            low = middle
        else:
            high = middle
    worst = (max(_at_least(found.wins, n, t + min_gain), _at_most(found.losses, n, t)) for t in (low, high))
    return min(1.0, 2 * min(worst))


def least_gain_shown(found: Tally, level: float) -> float:
    """Return the largest gain of which the outcomes show, at a level, that the true gain is above it; from -1 to 1.

    It is the lower end of an interval by the bounds of `improvement_p`, one-sided.
    """
    low, high = -1.0, 1.0
    for _ in range(_STEPS // 2):
        middle = (low + high) / 2 or 1e-9  # at 0 the sign test answers, which is another test
        low, high = (middle, high) if improvement_p(found, middle) <= level else (low, middle)
    return low


def _at_least(wins: int, n: int, share: float) -> float:
    """Return P(Bin(n, share) >= wins); 0 for a share below 0, which nothing has."""
    if share < 0:
        return 0.0
    return fsum(chances(n, share)[wins:])


def _at_most(losses: int, n: int, share: float) -> float:
    return fsum(chances(n, share)[: losses + 1])


def chances(n: int, share: float) -> list[float]:
    """Return the probability of 0, 1, ... n successes of n."""
    if share <= 0 or share >= 1:
        sure = 0 if share <= 0 else n
        return [float(k == sure) for k in range(n + 1)]
    factorials, won, lost = _log_factorials(n), log(share), log1p(-share)
    return [exp(factorials[n] - factorials[k] - factorials[n - k] + k * won + (n - k) * lost) for k in range(n + 1)]


@lru_cache(maxsize=256)
def _log_factorials(most: int) -> list[float]:
    return [lgamma(k + 1) for k in range(most + 1)]


def symmetric_bound(differences: Sequence[float]) -> float:
    """Return a bound of the chance of a sum at least as large, were each difference as likely with the other sign.

        p <= exp(-t^2 / 2)        t = sum_i d_i / sqrt(sum_i d_i^2)

    Equal policies may be exchanged on any problem, so each difference is as likely with the other sign. One-sided, and
    valid for any number of differences and any distribution; about twice to four times the p-value of
    the normal approximation, where that is right. 1 where the sum is not above 0.

    Args:
        differences: how much worse the candidate is on each problem.

    Returns:
        A bound in (0, 1].

    Source:
        Efron 1969, "Student's t-test under symmetry conditions", JASA 64; the bound is Hoeffding's.

    Example:
        >>> round(symmetric_bound([2.0, 2.0, 2.0, 2.0]), 4)  # t = 2
        0.1353
    """
    total, squares = fsum(differences), fsum(each * each for each in differences)
    return exp(-total * total / squares / 2) if total > 0 else 1.0


def rejected(chances: Sequence[float], level: float) -> list[bool]:
    """Return which of several hypotheses are rejected, so that any wrong rejection has at most the chance `level`.

    Holm: the smallest of m p-values is compared with level / m, the next with level / (m - 1), and so on until one is
    not below. It needs no independence.

    Args:
        chances: a p-value each.
        level: in (0, 1).

    Returns:
        True for each that is rejected, in the order of the p-values.

    Source:
        Holm 1979, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6.

    Example:
        >>> rejected([0.04, 0.01, 0.03], 0.05)  # 0.01 <= 0.05 / 3, but 0.03 > 0.05 / 2
        [False, True, False]
    """
    found = [False] * len(chances)
    for done, place in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
        if chances[place] > level / (len(chances) - done):
            break
        found[place] = True
    return found

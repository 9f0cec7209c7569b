"""How often two equal policies would differ so much: exact bounds for paired differences, and for several at once.

Equal policies may be exchanged on any problem, so each difference is as likely with the other sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, fsum


def symmetric_bound(differences: Sequence[float]) -> float:
    """Return a bound of the chance of a sum at least as large, were each difference as likely with the other sign.

        p <= exp(-t^2 / 2)        t = sum_i d_i / sqrt(sum_i d_i^2)

    One-sided, and valid for any number of differences and any distribution; about twice to four times the p-value of
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

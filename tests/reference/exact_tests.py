"""Exact tests of paired outcomes, by enumerating every case in fractions."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from math import comb


def sign_test(wins: int, losses: int) -> Fraction:
    """Count the sequences of fair coins with so many heads or more."""
    n = wins + losses
    return Fraction(sum(sum(coins) >= wins for coins in product((0, 1), repeat=n)), 2**n)


def binomial(n: int, k: int, p: Fraction) -> Fraction:
    """Return P(Bin(n, p) = k)."""
    return comb(n, k) * p**k * (1 - p) ** (n - k)


def trinomial(n: int, wins: int, losses: int, p: Fraction, q: Fraction) -> Fraction:
    """Return the probability of so many wins (each p) and losses (each q) of n."""
    return comb(n, wins) * comb(n - wins, losses) * p**wins * q**losses * (1 - p - q) ** (n - wins - losses)

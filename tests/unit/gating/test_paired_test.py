from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import pytest

from rlhf_core.gating import Tally, improvement_p, least_gain_shown, sign_test, tally
from rlhf_core.gating.paired_test import rejected, symmetric_bound
from tests.reference import exact_tests


@pytest.mark.parametrize(("wins", "losses"), product(range(7), range(7)))
def test_the_sign_test_agrees_with_counting_all_coins(wins: int, losses: int) -> None:
    assert sign_test(wins, losses) == float(exact_tests.sign_test(wins, losses))


def test_the_sign_test_has_the_published_values() -> None:
    # as binom.test(31, 40, alternative = "greater") of R, and of scipy, has it
    assert sign_test(31, 9) == pytest.approx(0.0003397741, rel=1e-6)
    assert sign_test(0, 0) == 1.0
    assert sign_test(0, 5) == 1.0
    assert sign_test(1000, 0) == 0.5**1000  # no rounding to 0
    assert sign_test(2000, 2000) == pytest.approx(0.5063, abs=1e-4)  # 1/2 and half of the middle, 1 / sqrt(pi n) / 2
    with pytest.raises(ValueError, match="got -1 wins"):
        sign_test(-1, 2)


def test_wins_and_losses_are_counted_on_the_same_problems() -> None:
    before, after = {"a": 0.0, "b": 1.0, "c": 0.5}, {"c": 0.9, "b": 0.0, "a": 0.0}
    assert tally(before, after) == Tally(wins=1, losses=1, problems=3)
    assert tally(before, after, margin=0.4) == Tally(0, 2, 3)  # 0.9 - 0.5 is 0.4: neither
    with pytest.raises(ValueError, match="same problems, got 3 before and 2 after"):
        tally(before, {"a": 1.0, "b": 1.0})


def test_a_least_gain_has_the_p_value_of_both_bounds_at_once() -> None:
    # 20 wins of 20, against a gain of 0.1 at most: the losses' share t has P(Bin(20, t) <= 0) = (1 - t)^20, the wins'
    # (t + 0.1)^20; they meet at t = 0.45, so p = 2 * 0.55^20
    assert improvement_p(Tally(20, 0, 20), 0.1) == pytest.approx(2 * 0.55**20)
    # nothing but draws shows that not all are lost
    assert improvement_p(Tally(0, 0, 20), -1.0) < 1e-12
    assert improvement_p(Tally(0, 20, 20), -1.0) == 1.0


@pytest.mark.parametrize("least", [Fraction(1, 10), Fraction(1, 4), Fraction(-1, 5)])
def test_a_gain_of_just_the_least_is_shown_no_more_often_than_the_level_allows(least: Fraction) -> None:
    n, level = 14, 0.1
    shown = [
        (wins, losses)
        for wins in range(n + 1)
        for losses in range(n + 1 - wins)
        if improvement_p(Tally(wins, losses, n), float(least)) <= level
    ]
    assert shown
    for lost in (Fraction(k, 40) for k in range(21)):
        won = lost + least
        if won < 0 or won + lost > 1:
            continue
        chance = sum(exact_tests.trinomial(n, wins, losses, won, lost) for wins, losses in shown)
        assert chance <= level


def test_the_least_gain_shown_is_where_the_p_value_is_the_level() -> None:
    found = Tally(60, 20, 200)
    shown = least_gain_shown(found, 0.01)
    assert 0 < shown < found.gain
    assert improvement_p(found, shown - 1e-3) < 0.01 < improvement_p(found, shown + 1e-3)
    assert least_gain_shown(Tally(0, 200, 200), 0.01) < -0.9


@pytest.mark.parametrize("differences", [[1.0, 1.0, 1.0], [0.5, -2.0, 3.0, 4.0, 0.1], [9.0, 0.1, 0.1, 0.1, -0.2, 1.0]])
def test_the_bound_is_above_the_share_of_all_signs_that_give_as_much(differences: list[float]) -> None:
    sums = [
        math.fsum(s * d for s, d in zip(signs, differences, strict=True))
        for signs in product((1, -1), repeat=len(differences))
    ]
    exact = sum(each >= math.fsum(differences) - 1e-12 for each in sums) / len(sums)
    assert exact <= symmetric_bound(differences) < 1


def test_what_did_not_get_worse_is_explained_by_chance() -> None:
    assert symmetric_bound([-1.0, 0.5]) == symmetric_bound([]) == symmetric_bound([0.0]) == 1.0


def test_holm_stops_at_the_first_that_is_not_small_enough() -> None:
    # thresholds 0.05/4, 0.05/3, 0.05/2, 0.05 for 0.01, 0.015, 0.03, 0.04: the third is above 0.025
    assert rejected([0.04, 0.01, 0.03, 0.015], 0.05) == [False, True, False, True]
    assert rejected([], 0.05) == []

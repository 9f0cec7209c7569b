from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from rlhf_core.gating import Tally, chance_to_pass, fewest_problems, improvement_p, power, sign_test, smallest_gain
from rlhf_core.gating.power import problems_needed
from tests.reference import exact_tests

LEVEL = 0.05 / 365


def test_power_is_the_sum_over_all_outcomes_that_pass() -> None:
    n, gain, differing, level = 9, Fraction(3, 10), Fraction(1, 2), 0.2
    won, lost = (differing + gain) / 2, (differing - gain) / 2
    expected = sum(
        exact_tests.trinomial(n, wins, losses, won, lost)
        for wins in range(n + 1)
        for losses in range(n + 1 - wins)
        if exact_tests.sign_test(wins, losses) <= level
    )
    found = power(problems=n, gain=float(gain), differing=float(differing), level=level)
    assert found == pytest.approx(float(expected))


def test_power_without_a_gain_is_at_most_the_level() -> None:
    assert 0 < power(problems=500, gain=0.0, differing=0.3, level=LEVEL) <= LEVEL


def test_the_smallest_gain_is_seen_in_eight_of_ten_draws() -> None:
    gain = smallest_gain(200, LEVEL)
    assert gain is not None
    draws = np.random.default_rng(0).multinomial(200, [(0.3 + gain) / 2, (0.3 - gain) / 2, 0.7], size=4000)
    passed = np.mean([sign_test(int(wins), int(losses)) <= LEVEL for wins, losses, _ in draws])
    assert passed == pytest.approx(0.8, abs=0.03)  # standard error 0.006
    assert smallest_gain(20, LEVEL) is None


def test_the_smallest_gain_above_a_least_one_is_seen_in_about_eight_of_ten_draws() -> None:
    for min_gain in (0.05, -0.1):
        gain = smallest_gain(200, LEVEL, min_gain=min_gain)
        assert gain is not None
        draws = np.random.default_rng(0).multinomial(200, [(0.3 + gain) / 2, (0.3 - gain) / 2, 0.7], size=200)
        passed = np.mean([improvement_p(Tally(*map(int, draw[:2]), 200), min_gain) <= LEVEL for draw in draws])
        assert passed == pytest.approx(0.8, abs=0.1)  # standard error 0.03, and the normal approximation's
    assert smallest_gain(200, LEVEL, min_gain=0.25) is None


def test_so_many_problems_as_are_told_show_the_gain() -> None:
    assert power(problems=problems_needed(0.08, LEVEL), gain=0.08, differing=0.3, level=LEVEL) == pytest.approx(
        0.8, abs=0.02
    )


def test_below_the_fewest_problems_all_of_them_would_not_suffice() -> None:
    for level in (0.05, 0.03125, LEVEL):
        for min_gain in (0.0, 0.2, -0.3):
            fewest = fewest_problems(level, min_gain)
            enough, too_few = (improvement_p(Tally(n, 0, n), min_gain) for n in (fewest, fewest - 1))
            assert enough <= level < too_few
    assert fewest_problems(LEVEL, -1.0) == 1


def test_the_chance_to_pass_is_about_that_of_draws_at_the_same_rates() -> None:
    so_far, level = Tally(40, 20, 200), 0.001
    draws = np.random.default_rng(0).multinomial(400, [0.2, 0.1, 0.7], size=4000)
    passed = np.mean([sign_test(40 + int(wins), 20 + int(losses)) <= level for wins, losses, _ in draws])
    assert chance_to_pass(so_far, level, 400) == pytest.approx(passed, abs=0.05)
    assert chance_to_pass(Tally(20, 20, 200), level, 400) == 0.0

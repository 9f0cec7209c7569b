"""Intervals against published figures, a bootstrap-free coverage count, and their limits."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest

from rlhf_core.functional.intervals import (
    mean_interval,
    normal_interval,
    paired_difference_interval,
    wilson_interval,
)


def test_wilson_by_hand() -> None:
    # p = 1/2, n = 4, z = 1.95996: centre 1/2, half = z sqrt(1/16 + z^2/64) / (1 + z^2/4)
    # = 1.95996 * sqrt(0.0625 + 0.0600227) / 1.960364 = 0.349961
    found = wilson_interval(2, 4, 0.95)
    assert found == pytest.approx((0.5, 0.150039, 0.849961), abs=1e-5)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # R: prop.test(x, n, correct = FALSE)
    [(15, 148, 0.0624, 0.1605), (81, 263, 0.2553, 0.3662), (0, 20, 0.0, 0.1611), (29, 29, 0.883, 1.0)],
)
def test_wilson_agrees_with_published_intervals(successes: int, n: int, low: float, high: float) -> None:
    found = wilson_interval(successes, n, 0.95)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


def test_wilson_ends_solve_the_equation_that_defines_them() -> None:
    # |p - x| = z sqrt(x (1 - x) / n) at both ends x, with z of 90 %
    found = wilson_interval(37, 120, 0.9)
    for end in (found.low, found.high):
        assert abs(found.estimate - end) == pytest.approx(1.6448536 * math.sqrt(end * (1 - end) / 120))


def test_wilson_is_symmetric_and_stays_within_zero_and_one() -> None:
    for successes in range(11):
        found, mirrored = wilson_interval(successes, 10, 0.99), wilson_interval(10 - successes, 10, 0.99)
        assert (found.low, found.high) == pytest.approx((1 - mirrored.high, 1 - mirrored.low))
        assert 0 <= found.low <= found.estimate <= found.high <= 1


def test_paired_difference_by_hand() -> None:
    # 400 problems, 134 gained, 10 lost: mean 0.31, sum of squares 144 - 400 * 0.31^2 = 105.56,
    # standard error sqrt(105.56 / 399 / 400) = 0.025718, times 1.95996
    before = [False] * 134 + [True] * 10 + [True] * 203 + [False] * 53
    after = [True] * 134 + [False] * 10 + [True] * 203 + [False] * 53
    found = paired_difference_interval(before, after, 0.95)
    assert found == pytest.approx((0.31, 0.31 - 0.050406, 0.31 + 0.050406), abs=1e-5)
    turned = paired_difference_interval(after, before, 0.95)
    assert turned == pytest.approx((-0.31, -found.high, -found.low))


def test_a_mean_from_its_figures_by_hand() -> None:
    # 1.959964 * 0.8 / sqrt(64) = 0.195996
    found = normal_interval(mean=0.5, std=0.8, n=64, confidence=0.95)
    assert found == pytest.approx((0.5, 0.304004, 0.695996), abs=1e-6)
    for wrong in ({"n": 1, "std": 1.0}, {"n": 2, "std": -1.0}):
        with pytest.raises(ValueError, match="at least 2 values and a standard deviation of at least 0"):
            normal_interval(mean=0.0, confidence=0.95, **wrong)  # type: ignore[arg-type]


def test_a_mean_by_hand() -> None:
    # 1, 2, 4, 5: mean 3, squares 4 + 1 + 1 + 4 = 10, standard error sqrt(10 / 3 / 4) = 0.912871, times 1.959964
    assert mean_interval([1.0, 2.0, 4.0, 5.0], 0.95) == pytest.approx((3.0, 3 - 1.789194, 3 + 1.789194), abs=1e-5)
    assert mean_interval([0.5, 0.5], 0.95) == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="at least 2 values, got 1"):
        mean_interval([1.0], 0.95)


def test_paired_scores_by_hand() -> None:
    # differences 0.5, -0.25, 0.5: mean 0.25, squares 0.0625 + 0.25 + 0.0625 = 0.375,
    # standard error sqrt(0.375 / 2 / 3) = 0.25, times 1.959964
    found = paired_difference_interval([0.0, 1.25, -1.0], [0.5, 1.0, -0.5], 0.95)
    assert found == pytest.approx((0.25, 0.25 - 0.489991, 0.25 + 0.489991), abs=1e-5)


def test_right_and_wrong_are_one_and_zero() -> None:
    before, after = [True, False, False, True], [True, True, False, False]
    numbers = paired_difference_interval([1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0], 0.9)
    assert paired_difference_interval(before, after, 0.9) == numbers


def test_pairing_matters() -> None:
    # The same shares (6 and 8 of 20): with the same problems right, the interval is narrower.
    before = [True] * 6 + [False] * 14
    nested = [True] * 8 + [False] * 12
    apart = [False] * 12 + [True] * 8
    tight, wide = (paired_difference_interval(before, after, 0.95) for after in (nested, apart))
    assert tight.estimate == pytest.approx(wide.estimate)
    assert tight.high - tight.low < (wide.high - wide.low) / 2


def test_no_difference_has_no_width() -> None:
    same = [True, False, True]
    assert paired_difference_interval(same, same, 0.95) == (0.0, 0.0, 0.0)


def test_the_paired_interval_covers_about_as_often_as_it_says() -> None:
    # Differences -1, 0, 1 with probabilities .1, .6, .3 (mean .2): all outcomes of 60 problems, by multinomial.
    covered = 0.0
    n, lose, gain = 60, 0.1, 0.3
    for lost, gained in itertools.product(range(n + 1), repeat=2):
        kept = n - lost - gained
        if kept < 0:
            continue
        ways = math.comb(n, lost) * math.comb(n - lost, gained)
        before = [True] * lost + [False] * (gained + kept)
        after = [False] * lost + [True] * gained + [False] * kept
        found = paired_difference_interval(before, after, 0.95)
        if found.low <= gain - lose <= found.high:
            covered += ways * lose**lost * gain**gained * (1 - lose - gain) ** kept
    assert 0.93 < covered < 0.96


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (5, 4), (-1, 4)])
def test_impossible_counts_are_refused(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="successes <= n"):
        wilson_interval(successes, n, 0.95)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="same problems, got 2 before and 1 after"):
        paired_difference_interval([True, False], [True], 0.95)
    with pytest.raises(ValueError, match="at least 2 problems"):
        paired_difference_interval([True], [False], 0.95)
    for confidence in (0.0, 1.0, 95.0):
        with pytest.raises(ValueError, match="confidence between 0 and 1"):
            wilson_interval(1, 2, confidence)


def test_the_gate_needs_no_torch() -> None:
    code = "import sys, rlhf_core.functional.intervals; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0

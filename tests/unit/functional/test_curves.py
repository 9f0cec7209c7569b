"""How flat the end of a curve is."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlhf_core.functional.curves import Fall, last_quarter, relative_fall


def test_a_line_with_scatter_by_hand() -> None:
    # mean 2; deviations of t -1.5, -.5, .5, 1.5, of x 1, 0, 0, -1: slope (-1.5 - 1.5) / 5 = -.6; fall 1.8 of 2.
    # line 2.9, 2.3, 1.7, 1.1: residuals .1, -.3, .3, -.1, squares .2, over n - 2: .1; error 3 / 2 * sqrt(.1 / 5)
    found = relative_fall([3.0, 2.0, 2.0, 1.0])
    assert found == pytest.approx((0.9, 1.5 * math.sqrt(0.02)), rel=1e-12)


def test_it_agrees_with_a_library_on_a_noisy_curve() -> None:
    values = 1 + np.random.default_rng(0).random(17)
    (slope, _), covariance = np.polyfit(np.arange(17), values, 1, cov=True)
    found = relative_fall(values.tolist())
    assert found.relative == pytest.approx(-slope * 16 / values.mean(), rel=1e-9)
    assert found.error == pytest.approx(math.sqrt(covariance[0, 0]) * 16 / values.mean(), rel=1e-9)


def test_its_limits() -> None:
    assert relative_fall([2.0, 2.0, 2.0, 2.0]) == relative_fall([0.0, 0.0, 0.0]) == Fall(0.0, 0.0)
    falling = [5.0, 4.5, 3.0, 2.0]
    assert relative_fall(falling[::-1]).relative == pytest.approx(-relative_fall(falling).relative)
    assert relative_fall([7 * value for value in falling]) == pytest.approx(relative_fall(falling), rel=1e-12)


@pytest.mark.parametrize(
    ("relative", "error", "word"),
    [
        (0.524, 0.1, "falling"), (-0.524, 0.1, "rising"),  # five standard errors
        (0.524, 0.3, "without a clear trend"), (-0.524, 0.3, "without a clear trend"),  # less than two
        (0.04, 0.001, "flat"), (-0.04, 0.04, "flat"), (0.0, 0.0, "flat"),
        (0.05, 0.02, "falling"), (0.04, 0.06, "without a clear trend"),  # 5 % is where a change begins
    ],
)  # fmt: skip
def test_no_large_change_is_called_flat_and_none_that_chance_may_be_is_called_a_trend(
    relative: float, error: float, word: str
) -> None:
    assert Fall(relative, error).word == word


@pytest.mark.parametrize("values", [[1.0, 1.0], [], [1.0, -0.1, 1.0]])
def test_too_few_values_and_negative_ones_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="at least 3 values, none below 0"):
        relative_fall(values)


@pytest.mark.parametrize(("steps", "last"), [(100, 25), (24, 6), (17, 5), (16, 4), (5, 4), (4, 4), (3, 3), (1, 1)])
def test_the_last_quarter_is_rounded_up_and_has_four_steps_if_there_are_so_many(steps: int, last: int) -> None:
    assert list(last_quarter(range(steps))) == list(range(steps - last, steps))

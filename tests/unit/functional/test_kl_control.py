"""The adaptive coefficient: by hand, towards its target, and never to a sign change."""

from __future__ import annotations

import pytest

from rlhf_core.functional.kl import adaptive_kl_coef


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (6.0, 0.1),  # on target
        (6.6, 0.101),  # e = 0.1, times 100 / 1000
        (5.4, 0.099),
        (60.0, 0.102),  # e = 9, cut at 0.2
        (-60.0, 0.098),  # k1 may be negative
    ],
)
def test_the_coefficient_by_hand(observed: float, expected: float) -> None:
    found = adaptive_kl_coef(0.1, observed_kl=observed, target=6.0, samples=100, horizon=1000)
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_batch_of_nothing_changes_nothing() -> None:
    assert adaptive_kl_coef(0.1, observed_kl=60.0, target=6.0, samples=0, horizon=1000) == 0.1


def test_it_settles_where_the_divergence_is_the_target() -> None:
    coef = 1.0
    for _ in range(2000):  # a policy whose divergence is 0.6 / coefficient
        coef = adaptive_kl_coef(coef, observed_kl=0.6 / coef, target=6.0, samples=64, horizon=1000)
    assert coef == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize(("observed", "expected"), [(0.0, 0.08), (60.0, 0.12)])
def test_a_batch_far_longer_than_the_horizon_moves_the_coefficient_by_a_fifth(observed: float, expected: float) -> None:
    found = adaptive_kl_coef(0.1, observed_kl=observed, target=6.0, samples=10_000, horizon=100)
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_coefficient_that_fell_for_long_comes_back() -> None:
    coef = 0.1
    for _ in range(1000):
        coef = adaptive_kl_coef(coef, observed_kl=0.0, target=6.0, samples=1000, horizon=1000)
    assert coef == 1e-6
    for _ in range(100):
        coef = adaptive_kl_coef(coef, observed_kl=60.0, target=6.0, samples=1000, horizon=1000)
    assert coef == pytest.approx(1e-6 * 1.2**100)
    assert adaptive_kl_coef(1e-8, observed_kl=0.0, target=6.0, samples=1000, horizon=1000) == 1e-8


@pytest.mark.parametrize(
    "wrong", [{"target": 0.0}, {"horizon": 0}, {"samples": -1}, {"observed_kl": float("nan")}, {"kl_coef": 0.0}]
)
def test_what_lies_outside_its_range_is_refused(wrong: dict[str, float]) -> None:
    right = {"kl_coef": 0.1, "observed_kl": 1.0, "target": 6.0, "samples": 1, "horizon": 1}
    with pytest.raises(ValueError, match="KL that is a number"):
        adaptive_kl_coef(**{**right, **wrong})

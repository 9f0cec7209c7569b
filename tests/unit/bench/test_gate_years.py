"""The gate over simulated years, through its own code; docs/gate.md has a thousand of them."""

from __future__ import annotations

import numpy as np
import pytest

from bench.gate_years import UNKNOWN, World, former_gate_promotes, null_years, promoted_within
from rlhf_core.gating import Tally


def test_of_two_hundred_years_without_a_gain_few_hold_a_promotion() -> None:
    found = null_years(200, pool=1_000, differing=0.25, a_night=200)
    # at most 0.05 of years: of 200, more than 20 would come by chance with a probability of 0.0007 (binomial tail)
    assert found["false_years"] <= 0.1
    assert found["former_gate"] > 0.95


@pytest.mark.parametrize("differing", [0.15, 0.3])
def test_a_gain_of_eight_points_is_promoted_within_three_nights(differing: float) -> None:
    assert promoted_within(3, 200, a_night=500, gain=0.08, differing=differing) >= 0.8


def test_the_simulated_policies_have_the_gain_and_the_differences_that_are_asked() -> None:
    world = World(np.random.default_rng(0), 100_000, 100_000, differing=0.25, gain_of_challenger=0.08)
    world.challenger = np.full(100_000, UNKNOWN, dtype=np.int8)
    world.answer(slice(0, 100_000))
    drawn = world.tally(world.champion, world.with_tally(slice(0, 100_000), Tally(300, 200, 100_000)))
    assert drawn == Tally(300, 200, 100_000)
    for found in (world.candidate(slice(0, 100_000), 0.08), world.tally(world.champion, world.challenger)):
        assert found.gain == pytest.approx(0.08, abs=0.008)  # five standard errors
        assert (found.wins + found.losses) / 100_000 == pytest.approx(0.25, abs=0.008)


def test_the_former_gate_promoted_four_wins_to_none() -> None:
    # mean 0.02, standard error sqrt((4 - 200 * 0.02^2) / 199 / 200) = 0.00993; 1.96 of them are below the mean
    assert former_gate_promotes(Tally(4, 0, 200))
    assert not former_gate_promotes(Tally(3, 0, 200))

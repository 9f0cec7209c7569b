from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from rlhf_core.gating import Comparison, levels

START = datetime(2026, 1, 1, 2, tzinfo=UTC)


def nightly(days: int, *, a_day: int = 1, nights: int = 365) -> list[Comparison]:
    return [
        Comparison(START + timedelta(days=day, hours=number), 0.05, nights)
        for day in range(days)
        for number in range(a_day)
    ]


def test_a_night_has_its_share_of_the_year() -> None:
    found = levels(nightly(364))
    assert found == [pytest.approx(0.05 / 365)] * 364
    # the 365th finds one share left, and takes half; from then on one night goes for each that comes
    later = levels(nightly(1500))
    assert min(later) > 0.9 * 0.05 / 365 / 2
    assert np.mean(later[800:]) == pytest.approx(0.05 / 365, rel=0.01)


@pytest.mark.parametrize("comparisons", [nightly(1200), nightly(500, a_day=10), nightly(40, nights=3)])
def test_no_window_of_a_year_spends_more_than_the_years_error(comparisons: list[Comparison]) -> None:
    found = levels(comparisons)
    for first in range(0, len(comparisons), 7):
        inside = [
            level
            for level, each in zip(found, comparisons, strict=True)
            if timedelta(0) <= each.when - comparisons[first].when < timedelta(days=365)
        ]
        assert sum(inside) <= 0.05 + 1e-12


def test_more_comparisons_than_were_planned_have_half_of_what_is_left_each() -> None:
    expected = [0.025, 0.0125, 0.00625, 0.003125, 0.0015625]
    assert levels(nightly(1, a_day=5, nights=2)) == pytest.approx(expected)


def test_a_gate_that_is_made_stricter_counts_what_was_spent_before() -> None:
    before = [Comparison(START, 0.05, 1), Comparison(START + timedelta(days=1), 0.02, 1)]
    assert levels(before) == [0.025, 0.0]  # more than the 0.02 that are allowed now is gone
    assert levels([*before, Comparison(START + timedelta(days=366), 0.02, 1)])[-1] == 0.01

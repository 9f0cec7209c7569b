"""Schedules by hand."""

from __future__ import annotations

import pytest

from rlhf_core.training.schedules import warmup_then_constant, warmup_then_decay


def test_warm_up_rises_linearly_and_stays() -> None:
    factor = warmup_then_constant(2)
    assert [factor(step) for step in range(4)] == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert warmup_then_constant(0)(0) == 1.0


def test_decay_falls_linearly_to_zero_after_the_last_step() -> None:
    factor = warmup_then_decay(2, 6)
    assert [factor(step) for step in range(7)] == pytest.approx([1 / 3, 2 / 3, 1, 3 / 4, 1 / 2, 1 / 4, 0])


def test_a_warm_up_longer_than_the_run_still_gives_rates_above_zero() -> None:
    factor = warmup_then_decay(10, 3)
    assert [factor(step) for step in range(3)] == pytest.approx([1 / 3, 2 / 3, 1])
    assert warmup_then_decay(2, 1)(0) == 1.0

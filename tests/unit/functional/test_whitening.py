"""Sums and whitening count what the mask counts, once."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.functional.moments import masked_sum
from tests.reference import definitions
from tests.unit.functional.ragged import assert_close, mask, pad, random_rows, unpad, whitened


def test_the_sum_by_hand() -> None:
    rows = [[1.0, 2.0, 3.0, 4.0, 5.0], [13.0], [0.0, 0.0, 8.0]]  # 15 + 13 + 8
    assert_close(masked_sum(pad(rows), mask()), torch.tensor(36.0))


def test_whitening_by_hand() -> None:
    # 1, 3, 3, 5: mean 3, variance (4 + 0 + 0 + 4) / 4 = 2, so -sqrt 2, 0, 0, sqrt 2
    values = torch.tensor([[1.0, 3.0], [3.0, 5.0]])
    expected = torch.tensor([[-(2**0.5), 0.0], [0.0, 2**0.5]])
    assert_close(whitened(values, torch.ones(2, 2, dtype=torch.bool)), expected)


def test_whitening_agrees_with_its_definition() -> None:
    rows = random_rows(1, scale=3.0)
    for found, expected in zip(unpad(whitened(pad(rows), mask())), definitions.whiten(rows), strict=True):
        assert_close(torch.tensor(found), torch.tensor(expected))


def test_whitening_leaves_zero_on_padding_whatever_lies_there() -> None:
    rows = random_rows(2)
    with_nan, with_inf = (whitened(pad(rows, rubbish=rubbish), mask()) for rubbish in (float("nan"), float("inf")))
    assert torch.equal(with_nan, with_inf)
    assert torch.equal(with_nan[~mask()], torch.zeros(int((~mask()).sum())))


def test_whitening_does_not_care_for_shift_and_scale() -> None:
    rows = random_rows(3)
    values = pad(rows)
    assert_close(whitened(7 * values + 3, mask()), whitened(values, mask()))


@pytest.mark.parametrize("value", [0.7, 0.1, 1000.1, -3e7])
def test_equal_values_whiten_to_zero_exactly(value: float) -> None:
    values = torch.full((7,), value)  # in float32 the mean of 1000.1 is off by 6e-5, and would whiten to 0.5
    assert torch.equal(whitened(values, torch.ones(7, dtype=torch.bool)), torch.zeros(7))


def test_nothing_counted_gives_zero() -> None:
    nothing = torch.zeros(2, 2, dtype=torch.bool)
    values = torch.full((2, 2), float("nan"))
    assert masked_sum(values, nothing).item() == 0.0
    assert torch.equal(whitened(values, nothing), torch.zeros(2, 2))


def test_the_sum_does_not_change_its_argument() -> None:
    values = torch.tensor([1.0, 2.0])
    masked_sum(values, torch.tensor([True, False]))
    assert values.tolist() == [1.0, 2.0]

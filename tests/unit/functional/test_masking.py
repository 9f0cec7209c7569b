"""Means and whitening count what the mask counts, once."""

from __future__ import annotations

import torch

from rlhf_core.functional.masking import masked_mean, masked_sum
from rlhf_core.functional.moments import masked_whiten
from tests.reference import definitions
from tests.unit.functional.ragged import assert_close, mask, pad, random_rows, unpad


def test_the_mean_is_over_tokens_not_over_rows() -> None:
    rows = [[1.0, 2.0, 3.0, 4.0, 5.0], [13.0], [0.0, 0.0, 8.0]]
    # (15 + 13 + 8) / 9 = 4; the mean of row means would be (3 + 13 + 8/3) / 3 = 6.2
    assert_close(masked_mean(pad(rows), mask()), torch.tensor(4.0))
    assert_close(masked_sum(pad(rows), mask()), torch.tensor(36.0))


def test_whitening_by_hand() -> None:
    # 1, 3, 3, 5: mean 3, variance (4 + 0 + 0 + 4) / 4 = 2, so -sqrt 2, 0, 0, sqrt 2
    values = torch.tensor([[1.0, 3.0], [3.0, 5.0]])
    expected = torch.tensor([[-(2**0.5), 0.0], [0.0, 2**0.5]])
    assert_close(masked_whiten(values, torch.ones(2, 2, dtype=torch.bool)), expected)


def test_whitening_agrees_with_its_definition() -> None:
    rows = random_rows(1, scale=3.0)
    whitened = masked_whiten(pad(rows), mask())
    for found, expected in zip(unpad(whitened), definitions.whiten(rows), strict=True):
        assert_close(torch.tensor(found), torch.tensor(expected))


def test_whitening_leaves_zero_on_padding_whatever_lies_there() -> None:
    rows = random_rows(2)
    with_nan, with_inf = (masked_whiten(pad(rows, rubbish=rubbish), mask()) for rubbish in (float("nan"), float("inf")))
    assert torch.equal(with_nan, with_inf)
    assert torch.equal(with_nan[~mask()], torch.zeros(int((~mask()).sum())))


def test_whitening_does_not_care_for_shift_and_scale() -> None:
    rows = random_rows(3)
    values = pad(rows)
    assert_close(masked_whiten(7 * values + 3, mask()), masked_whiten(values, mask()))


def test_equal_values_whiten_to_zero() -> None:
    values = torch.full((2, 2), 0.7)
    assert_close(masked_whiten(values, torch.ones(2, 2, dtype=torch.bool)), torch.zeros(2, 2))


def test_nothing_counted_gives_zero() -> None:
    nothing = torch.zeros(2, 2, dtype=torch.bool)
    values = torch.full((2, 2), float("nan"))
    assert masked_mean(values, nothing).item() == 0.0
    assert masked_sum(values, nothing).item() == 0.0
    assert torch.equal(masked_whiten(values, nothing), torch.zeros(2, 2))


def test_the_mean_does_not_change_its_argument() -> None:
    values = torch.tensor([1.0, 2.0])
    masked_mean(values, torch.tensor([True, False]))
    assert values.tolist() == [1.0, 2.0]

"""Moments: what ranks add up is what one rank would have found; running moments are those of all values."""

from __future__ import annotations

import json
from statistics import fmean, pvariance

import pytest
import torch
from torch import Tensor

from rlhf_core.functional.moments import (
    RunningMoments,
    deviation_sum,
    masked_sums,
    whiten_with,
)
from tests.reference import definitions
from tests.unit.functional.ragged import assert_close, flat, mask, moments, pad, random_rows, unpad, whitened

ALL = slice(None)
NOTHING = torch.zeros(2, 2, dtype=torch.bool)


def test_moments_by_hand() -> None:
    # 1, 3, 3, 5: mean 3, variance (4 + 0 + 0 + 4) / 4 = 2
    found = moments(torch.tensor([[1.0, 3.0], [3.0, 5.0]]), torch.ones(2, 2, dtype=torch.bool))
    assert [moment.item() for moment in found] == [4.0, 3.0, 2.0]


def test_moments_agree_with_the_statistics_module_whatever_lies_in_the_padding() -> None:
    rows = random_rows(1, scale=3.0)
    for rubbish in (float("nan"), float("inf")):
        found = moments(pad(rows, rubbish=rubbish), mask())
        assert found.count.item() == len(flat(rows))
        assert found.mean.item() == pytest.approx(fmean(flat(rows)), rel=1e-5)
        assert found.variance.item() == pytest.approx(pvariance(flat(rows)), rel=1e-5)


def test_the_variance_of_values_far_from_zero_is_kept() -> None:
    values = torch.tensor([10_000.0, 10_001.0, 10_002.0])  # in float32 squares less a square give 0 or 8
    assert moments(values, values > 0).variance.item() == pytest.approx(2 / 3, rel=1e-5)


def test_nothing_counted_gives_zeros() -> None:
    values = torch.full((2, 2), float("nan"))
    assert [moment.item() for moment in moments(values, NOTHING)] == [0.0, 0.0, 0.0]
    assert [part.item() for part in masked_sums(values, NOTHING)] == [0.0, 0.0]
    assert deviation_sum(values, NOTHING, mean=0.0).item() == 0.0


def whitened_apart(values: Tensor, counts: Tensor, ranks: list[slice]) -> Tensor:
    """What ranks do that each hold some rows: two sums, added; then one more, added."""
    sums = [masked_sums(values[rows], counts[rows]) for rows in ranks]
    count, total = (torch.stack(part).sum() for part in zip(*sums, strict=True))
    mean = total / count
    squares = sum(deviation_sum(values[rows], counts[rows], mean=mean) for rows in ranks)
    parts = [whiten_with(values[rows], counts[rows], mean=mean, variance=squares / count) for rows in ranks]
    return torch.cat(parts)


def test_ranks_that_add_their_sums_whiten_as_one_rank_would() -> None:
    rows = random_rows(1, scale=3.0)
    found = whitened_apart(pad(rows), mask(), [slice(0, 1), slice(1, 1), slice(1, 3)])  # one rank holds nothing
    assert_close(found, whitened(pad(rows), mask()))
    for row, expected in zip(unpad(found), definitions.whiten(rows), strict=True):
        assert_close(torch.tensor(row), torch.tensor(expected))
    assert torch.equal(found[~mask()], torch.zeros(9))


def test_whitening_with_given_moments_by_hand() -> None:
    # (5 - 3) / sqrt(4) = 1; what is not counted stays zero
    found = whiten_with(torch.tensor([5.0, 7.0]), torch.tensor([True, False]), mean=3.0, variance=torch.tensor(4.0))
    assert_close(found, torch.tensor([1.0, 0.0]))


def test_running_moments_are_those_of_all_values_seen() -> None:
    rows = random_rows(3, scale=5.0)
    running = RunningMoments()
    for row in rows:
        running = running.updated(torch.tensor(row))
    assert running.count == len(flat(rows))
    assert running.mean == pytest.approx(fmean(flat(rows)), rel=1e-6)
    assert running.std**2 == pytest.approx(pvariance(flat(rows)), rel=1e-6)


def test_running_moments_do_not_care_in_which_batches_values_come() -> None:
    values = torch.tensor(flat(random_rows(4)))
    at_once = RunningMoments().updated(values)
    one_by_one = RunningMoments()
    for value in values:
        one_by_one = one_by_one.updated(value[None])
    assert one_by_one == pytest.approx(at_once, rel=1e-9)


def test_running_moments_travel_as_json() -> None:
    running = RunningMoments().updated(torch.tensor([0.1, 0.7]))
    assert RunningMoments(*json.loads(json.dumps(running))) == running


def test_equal_scores_have_nothing_to_be_divided_by() -> None:
    assert RunningMoments().std == 1.0
    same = RunningMoments()
    for _ in range(3):  # 0.1 is not a binary fraction: its mean must not be off by a rounding
        same = same.updated(torch.full((7,), 0.1))
    assert same.std == 1.0
    assert same.updated(torch.zeros(0)) == same


@pytest.mark.parametrize("score", [0.1, -3.3, 1000.1])
def test_scores_that_differ_by_rounding_alone_have_nothing_to_be_divided_by(score: float) -> None:
    """Of float64, whose mean is off by a rounding; and of float32, one of them by its last bit."""
    running = RunningMoments()
    for _ in range(3):
        running = running.updated(torch.full((7,), score, dtype=torch.float64))
    assert running.std == 1.0
    scores = torch.full((7,), score)
    scores[3] = torch.nextafter(scores[3], torch.tensor(1e9))
    spread = RunningMoments().updated(scores)
    assert spread.m2 > 0
    assert spread.std == 1.0, "its root would be divided by: 4e7 times the reward"
    assert RunningMoments(*json.loads(json.dumps(spread))).std == 1.0, "stored states hold what they held"


def test_a_small_spread_that_is_more_than_rounding_is_a_deviation() -> None:
    found = RunningMoments().updated(torch.tensor([1.0, 1.0001], dtype=torch.float64))
    assert found.std == pytest.approx(5e-5, rel=1e-6)
    assert RunningMoments().updated(torch.tensor([-1e-6, 1e-6])).std == pytest.approx(1e-6, rel=1e-5), "relative to 0"


def test_values_that_differ_by_rounding_alone_whiten_to_zero() -> None:
    values = torch.full((7,), 1000.1)
    values[3] = torch.nextafter(values[3], torch.tensor(1e9))
    counts = torch.ones(7, dtype=torch.bool)
    assert torch.equal(whitened(values, counts), torch.zeros(7))
    assert whitened(values + torch.arange(7), counts).square().mean().item() == pytest.approx(1, rel=1e-4)


def test_running_moments_refuse_what_would_spoil_them() -> None:
    with pytest.raises(ValueError, match="finite"):
        RunningMoments().updated(torch.tensor([1.0, float("nan")]))

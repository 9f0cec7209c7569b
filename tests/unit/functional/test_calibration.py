"""Calibration of pairs and histograms of scores, against arithmetic by hand and slow definitions."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.functional.calibration import pair_calibration, score_histogram

torch.set_num_threads(1)


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def test_error_bins_and_brier_of_four_pairs_by_hand() -> None:
    # p = .9 (right), .1 (wrong, confidence .9), .6 (right), .5 (a tie): bins [.5, .75) and [.75, 1]
    found = pair_calibration(torch.tensor([logit(0.9), logit(0.1), logit(0.6), 0.0]), bins=2)
    assert found.counts.tolist() == [2, 2]
    assert found.confidence.tolist() == pytest.approx([0.55, 0.9], abs=1e-6)
    assert found.correct.tolist() == pytest.approx([0.75, 0.5])
    # (2 |.75 - .55| + 2 |.5 - .9|) / 4
    assert found.expected_error.item() == pytest.approx(0.3, abs=1e-6)
    # (.1^2 + .9^2 + .4^2 + .5^2) / 4
    assert found.brier.item() == pytest.approx((0.01 + 0.81 + 0.16 + 0.25) / 4, abs=1e-6)


def slow_expected_error(gaps: list[float], bins: int) -> float:
    members: list[list[tuple[float, float]]] = [[] for _ in range(bins)]
    for gap in gaps:
        confidence = 1 / (1 + math.exp(-abs(gap)))
        place = min(int((confidence - 0.5) / (0.5 / bins)), bins - 1)
        members[place].append((confidence, 1.0 if gap > 0 else 0.5 if gap == 0 else 0.0))
    total = 0.0
    for pairs in members:
        if pairs:
            mean_confidence = sum(confidence for confidence, _ in pairs) / len(pairs)
            mean_correct = sum(right for _, right in pairs) / len(pairs)
            total += len(pairs) / len(gaps) * abs(mean_correct - mean_confidence)
    return total


@pytest.mark.parametrize("bins", [1, 7, 10])
def test_the_error_agrees_with_its_definition(bins: int) -> None:
    gaps = torch.randn(60, generator=torch.Generator().manual_seed(bins)) * 2
    expected = slow_expected_error([float(gap) for gap in gaps.double()], bins)
    assert pair_calibration(gaps, bins=bins).expected_error.item() == pytest.approx(expected, abs=1e-9)


def test_probabilities_that_come_true_have_hardly_any_error_and_overconfidence_has_some() -> None:
    generator = torch.Generator().manual_seed(0)
    gaps = torch.randn(20_000, generator=generator).abs() * 2
    right = torch.rand(20_000, generator=generator) < torch.sigmoid(gaps)
    signed = torch.where(right, gaps, -gaps)
    assert pair_calibration(signed).expected_error.item() < 0.02
    assert pair_calibration(3 * signed).expected_error.item() > 0.05
    assert pair_calibration(3 * signed).brier > pair_calibration(signed).brier


def test_a_sure_and_right_model_and_a_sure_and_wrong_one_are_the_limits() -> None:
    sure = torch.full((5,), 1e4)
    assert (pair_calibration(sure).expected_error.item(), pair_calibration(sure).brier.item()) == (0.0, 0.0)
    assert (pair_calibration(-sure).expected_error.item(), pair_calibration(-sure).brier.item()) == (1.0, 1.0)
    assert pair_calibration(sure).counts.tolist() == [0] * 9 + [5]


def test_the_order_of_pairs_does_not_matter() -> None:
    gaps = torch.randn(30, generator=torch.Generator().manual_seed(3))
    for one, other in zip(pair_calibration(gaps), pair_calibration(gaps.flip(0)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_histogram_counts_every_score_once_and_inner_edges_belong_above() -> None:
    found = score_histogram(chosen=torch.tensor([0.0, 1.0, 4.0]), rejected=torch.tensor([-4.0, 0.5, 3.9]), bins=4)
    assert found.edges.tolist() == [-4.0, -2.0, 0.0, 2.0, 4.0]
    assert found.chosen.tolist() == [0, 0, 2, 1]
    assert found.rejected.tolist() == [1, 0, 1, 1]


def test_histogram_agrees_with_numpys() -> None:
    import numpy as np

    scores = torch.randn(2, 50, generator=torch.Generator().manual_seed(4)).double()
    found = score_histogram(chosen=scores[0], rejected=scores[1], bins=9)
    limits = (scores.min().item(), scores.max().item())
    for row, counts in zip(scores, (found.chosen, found.rejected), strict=True):
        assert counts.tolist() == np.histogram(row.numpy(), bins=9, range=limits)[0].tolist()


def test_equal_scores_are_all_in_the_first_bin() -> None:
    found = score_histogram(chosen=torch.ones(3), rejected=torch.ones(3), bins=5)
    assert found.chosen.tolist() == found.rejected.tolist() == [3, 0, 0, 0, 0]


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one pair"):
        pair_calibration(torch.zeros(0))
    with pytest.raises(ValueError, match="0 bins"):
        score_histogram(chosen=torch.zeros(1), rejected=torch.zeros(1), bins=0)

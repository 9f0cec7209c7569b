"""What is measured on held-out pairs: accuracy, calibration, histogram, as numbers that JSON holds."""

from __future__ import annotations

import json
import math

import pytest
import torch

from rlhf_core.errors import DataError, TrainingError
from rlhf_core.supervised.measures import measurement


def test_four_pairs_by_hand() -> None:
    found = measurement(
        chosen=torch.tensor([2.0, 0.0, 1.0, 5.0]), rejected=torch.tensor([1.0, 1.0, 1.0, 1.0]), dropped=3
    )
    assert (found.pairs, found.correct, found.dropped, found.accuracy) == (4, 2, 3, 0.5)
    right = [1 / (1 + math.exp(-gap)) for gap in (1, -1, 0, 4)]
    assert found.loss == pytest.approx(-sum(map(math.log, right)) / 4, rel=1e-6)
    assert found.brier == pytest.approx(sum((1 - p) ** 2 for p in right) / 4, rel=1e-6)
    # confidences .731 (right, then wrong), .5 (a tie), .982 (right): bins 4, 0 and 9 of ten
    sure, surer = right[0], right[3]
    assert found.calibration_error == pytest.approx((2 * abs(0.5 - sure) + 0 + abs(1 - surer)) / 4, rel=1e-6)
    assert [(round(each.low, 2), each.pairs) for each in found.bins if each.pairs] == [(0.5, 1), (0.7, 2), (0.95, 1)]
    assert sum(found.histogram.chosen) == sum(found.histogram.rejected) == 4
    assert (found.histogram.edges[0], found.histogram.edges[-1]) == (0.0, 5.0)
    assert found.histogram.rejected[4] == 4  # 1.0 is the edge of [1.0, 1.25)


def test_the_facts_are_plain_json() -> None:
    facts = measurement(chosen=torch.randn(9), rejected=torch.randn(9)).facts()
    assert json.loads(json.dumps(facts, allow_nan=False))["accuracy"] == facts["correct"] / 9
    assert len(facts["bins"]) == 10
    assert len(facts["histogram"]["edges"]) == len(facts["histogram"]["chosen"]) + 1 == 21


def test_no_pairs_and_scores_that_are_not_finite_are_refused() -> None:
    with pytest.raises(DataError, match=r"got none \(2 were too long\)"):
        measurement(chosen=torch.zeros(0), rejected=torch.zeros(0), dropped=2)
    with pytest.raises(TrainingError, match="not all finite"):
        measurement(chosen=torch.tensor([math.nan]), rejected=torch.zeros(1))

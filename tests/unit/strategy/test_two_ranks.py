"""A sample of tests/parallel that every run of the tests takes: one learner on two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_core.strategy.ranks import ALONE
from tests.parallel import learner_cases
from tests.parallel.ranks import run_on_ranks

torch.set_num_threads(1)


def test_two_ranks_take_the_step_of_one_and_leave_out_the_same_one(tmp_path: Path) -> None:
    first, second = (found["mixed"] for found in run_on_ranks("tests.parallel.learner_cases", ["mixed"], tmp_path))
    alone = learner_cases.mixed(ALONE)
    assert first.numbers == pytest.approx(alone.numbers, rel=1e-5, abs=1e-7)
    assert first.tensors.keys() == alone.tensors.keys()
    for name, expected in alone.tensors.items():
        if ".exp_avg." in name:  # a tenth of the gradient
            tolerance = 1e-5 * expected.abs().max().item()
            torch.testing.assert_close(first.tensors[name], expected, rtol=0, atol=tolerance)
    assert second.tensors
    assert all(torch.equal(first.tensors[name], weight) for name, weight in second.tensors.items())
    exploded = run_on_ranks("tests.parallel.learner_trouble_cases", ["exploding"], tmp_path)
    assert [found["exploding"].numbers["0.skipped"] for found in exploded] == [1.0, 1.0]

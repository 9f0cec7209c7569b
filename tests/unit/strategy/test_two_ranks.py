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
    first, second = run_on_ranks("tests.parallel.learner_cases", ["mixed", "exploding"], tmp_path)
    alone = learner_cases.mixed(ALONE)
    assert first["mixed"].numbers == pytest.approx(alone.numbers, rel=1e-5, abs=1e-7)
    for name, expected in alone.tensors.items():
        if ".exp_avg." in name:  # a tenth of the gradient
            tolerance = 1e-5 * expected.abs().max().item()
            torch.testing.assert_close(first["mixed"].tensors[name], expected, rtol=0, atol=tolerance)
        assert torch.equal(first["mixed"].tensors[name], second["mixed"].tensors[name])
    assert [found["exploding"].numbers["0.skipped"] for found in (first, second)] == [1.0, 1.0]

"""A sample of tests/parallel/test_zero.py that every run of the tests takes: DDP and ZeRO-2 on two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_core.strategy.ranks import ALONE
from tests.parallel import zero_cases
from tests.parallel.ranks import run_on_ranks
from tests.parallel.zero_model import OTHER_LR, STEPS

pytestmark = pytest.mark.integration  # processes of their own

torch.set_num_threads(1)


def test_two_ranks_of_ddp_and_zero_take_the_steps_of_one(tmp_path: Path) -> None:
    cases = ["steps:ddp:fp32", "steps:zero2:fp32"]
    first, second = run_on_ranks("tests.parallel.zero_cases", cases, tmp_path)
    alone = zero_cases.steps(ALONE, "plain", "fp32")
    for case in cases:
        assert first[case].numbers == second[case].numbers == pytest.approx(alone.numbers, rel=1e-5)
        for name, expected in alone.tensors.items():
            part = name.split("/")[0]
            if part == "first":
                tolerance = 1e-5 * expected.abs().max().item()
                torch.testing.assert_close(first[case].tensors[name], expected, rtol=0, atol=tolerance)
            elif part == "weight":
                torch.testing.assert_close(first[case].tensors[name], expected, rtol=0, atol=STEPS * OTHER_LR)

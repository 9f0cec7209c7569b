"""A base on a GPU gives the numbers of the mapped one, and another process opens it through CUDA IPC."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf_core.models.base import WEIGHTS, Base, load_base
from rlhf_core.models.base_on_gpu import Loan, borrowing, loans_of
from tests.forked import exit_of
from tests.unit.models.test_base import IDS, opened

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device"),
]


def borrow(loans: tuple[Loan, ...], base: Base, expected: Tensor) -> None:
    with borrowing(loans):
        model = load_base(base, arithmetic=torch.float32, device="cuda")
    assert torch.cuda.memory_allocated() < (base.directory / WEIGHTS).stat().st_size / 2  # nothing was copied
    assert torch.equal(model(IDS.cuda()).logits.cpu(), expected)


def test_a_borrowed_base_takes_no_memory_and_gives_the_lenders_numbers(tmp_path: Path) -> None:
    base = opened(tmp_path, arithmetic=torch.float32)
    lender = load_base(base, arithmetic=torch.float32, device="cuda")
    expected = lender(IDS.cuda()).logits.cpu()
    on_cpu = load_base(base, arithmetic=torch.float32)(IDS).logits
    torch.testing.assert_close(expected, on_cpu, rtol=1e-3, atol=1e-3)
    for _ in range(2):  # a maker that came up again, too
        assert exit_of(borrow, loans_of(lender), base, expected) == 0
    assert torch.equal(lender(IDS.cuda()).logits.cpu(), expected)

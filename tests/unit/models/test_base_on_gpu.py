"""A base in a GPU's memory, lent to another process. Memory of the CPU stands for the GPU's here.

Tests with a GPU are in tests/gpu/test_base_on_gpu.py.
"""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from transformers import PreTrainedModel

from rlhf_core.errors import ModelError
from rlhf_core.models import base_on_gpu
from rlhf_core.models.base import WEIGHTS, Base, load_base, over_same_weights
from rlhf_core.models.base_on_gpu import Loan, borrowing, loans_of, move_to_gpu
from tests.forked import exit_of
from tests.unit.models.test_base import IDS, opened

torch.set_num_threads(1)

CPU = torch.device("cpu")


def placed(base: Base) -> PreTrainedModel:
    model = load_base(base, arithmetic=base.dtype)
    move_to_gpu(model, base.directory / WEIGHTS, base.file, CPU)
    return model


def addresses(model: PreTrainedModel) -> set[int]:
    return {parameter.data_ptr() for parameter in model.parameters()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_weights_of_a_copy_are_those_of_the_file(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    base = opened(tmp_path, architecture, published=dtype, arithmetic=dtype)
    mapped, model = load_base(base, arithmetic=dtype), placed(base)
    assert addresses(model).isdisjoint(addresses(mapped))
    for name, parameter in mapped.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    assert torch.equal(model(IDS).logits, mapped(IDS).logits)


def test_a_copy_that_does_not_fit_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = opened(tmp_path)
    monkeypatch.setattr(base_on_gpu, "_free_bytes", lambda _: base.file[1] - 1)
    with pytest.raises(ModelError, match=r"a copy of the base takes .* GB on cpu, where .* GB are free; end what else"):
        placed(base)


def test_models_of_a_process_are_views_of_one_copy_which_goes_with_the_last(tmp_path: Path) -> None:
    base = opened(tmp_path)
    first, second = placed(base), placed(base)
    third = over_same_weights(second)
    assert addresses(first) == addresses(second) == addresses(third)
    assert len(loans_of(first, None, third)) == 1
    published = first.lm_head.weight[0, 0].clone()
    with torch.no_grad():
        first.lm_head.weight[0, 0] = 3.0
    del first, second, third
    gc.collect()
    assert placed(base).lm_head.weight[0, 0] == published


def test_models_on_the_cpu_have_nothing_to_lend(tmp_path: Path) -> None:
    assert loans_of(load_base(opened(tmp_path), arithmetic=torch.bfloat16)) == ()


def borrow_and_write(loans: tuple[Loan, ...], base: Base) -> None:
    """See the lender's number, and leave one that it sees: only one memory has both."""
    with borrowing(loans):
        model = placed(base)
    gc.collect()
    weight = model.lm_head.weight
    assert weight[0, 0] == 3.0
    with torch.no_grad():
        weight[0, 1] = 5.0


@pytest.mark.integration
def test_another_process_has_the_lenders_memory(tmp_path: Path) -> None:
    base = opened(tmp_path)
    lender = placed(base)
    with torch.no_grad():
        lender.lm_head.weight[0, 0] = 3.0
    assert exit_of(borrow_and_write, loans_of(lender), base) == 0
    assert exit_of(borrow_and_write, loans_of(lender), base) == 0  # a maker that came up again
    assert lender.lm_head.weight[0, 1] == 5.0


def test_a_base_on_another_gpu_is_not_borrowed(tmp_path: Path) -> None:
    base = opened(tmp_path)
    lender = placed(base)
    (loan,) = loans_of(lender)
    expected = addresses(lender)
    del lender
    gc.collect()
    unseen = loan.key._replace(device=torch.device("cuda:7"))
    for elsewhere in (loan._replace(gpu="GPU-1"), loan._replace(key=unseen)):
        with borrowing([elsewhere]):
            assert addresses(placed(base)) != expected


def refuse() -> NoReturn:
    raise RuntimeError("no IPC here")  # as PyTorch does


def test_what_cannot_be_opened_is_copied_once_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = opened(tmp_path)
    (loan,) = loans_of(placed(base))
    with caplog.at_level(logging.WARNING), borrowing([loan._replace(opens=refuse, handle=())]):
        model = placed(base)
    assert torch.equal(model(IDS).logits, load_base(base, arithmetic=torch.bfloat16)(IDS).logits)
    assert "are taken for another copy: no IPC here" in caplog.text

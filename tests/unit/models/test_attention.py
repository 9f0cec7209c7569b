"""Attention over short rows: the kernel's numbers, as near to exact ones, and the kernel itself for all else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlhf_core.models import attention
from rlhf_core.models.attention import attend
from rlhf_core.models.shape import SHORT_ROW
from rlhf_core.models.trunk import autocast
from tests.tiny_llama import tiny_llama

ROWS, HEADS, SHARED, SIZE, PADDING = 3, 6, 2, 8, 2
NUMBERS = (HEADS, SHARED, SHARED, HEADS)
LAYER: Any = SimpleNamespace(num_key_value_groups=HEADS // SHARED, is_causal=True)


def tensors(length: int, dtype: torch.dtype, offset: float = 0.0) -> list[Tensor]:
    """Queries, keys, values, and the gradients of what comes out, without those of padding."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(ROWS, heads, length, SIZE, generator=generator) for heads in NUMBERS]
    made[0] += min(offset, 1.0)
    made[1] += offset
    made[3][0, :, :PADDING] = 0.0
    query, key, value, grad = (each.bfloat16().to(dtype) for each in made)
    return [*(each.requires_grad_() for each in (query, key, value)), grad.transpose(1, 2)]


def mask_of(length: int) -> Tensor:
    """Return the mask of rows of which the first begins with padding."""
    mask = torch.ones(length, length, dtype=torch.bool).tril().repeat(ROWS, 1, 1, 1)
    mask[0, :, :, :PADDING] = False
    return mask


def computed(how: Any, length: int, dtype: torch.dtype, mask: Tensor | None, offset: float) -> list[Tensor]:
    """Return what comes out, and the gradients, in float64."""
    *taken, grad = tensors(length, dtype, offset)
    found, _ = how(LAYER, *taken, mask)
    found.backward(grad)
    real = found.detach().clone()
    real[0, :PADDING] = 0.0  # whatever padding attends to
    return [each.double() for each in (real, *(each.grad for each in taken if each.grad is not None))]


@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("is_padded", [True, False])
@pytest.mark.parametrize("length", [2, 17, SHORT_ROW])
def test_it_is_as_near_to_exact_attention_as_the_kernel(length: int, is_padded: bool, offset: float) -> None:
    mask = mask_of(length) if is_padded else None
    exact = computed(sdpa_attention_forward, length, torch.float64, mask, offset)
    ours, theirs = (computed(how, length, torch.bfloat16, mask, offset) for how in (attend, sdpa_attention_forward))
    for one, other, right in zip(ours, theirs, exact, strict=True):
        assert one.shape == right.shape
        assert (one - right).norm() <= 1.5 * (other - right).norm() + 1e-3 * right.norm()


@pytest.mark.parametrize(
    ("dtype", "length", "mask", "options"),
    [
        (torch.float32, 8, None, {}),
        (torch.float16, 8, None, {}),
        (torch.bfloat16, SHORT_ROW + 1, None, {}),
        (torch.bfloat16, 1, None, {}),
        (torch.bfloat16, 8, None, {"dropout": 0.5}),
        (torch.bfloat16, 8, None, {"softcap": 30.0}),
        (torch.bfloat16, 8, None, {"is_causal": False}),
        (torch.bfloat16, 8, torch.zeros(ROWS, 1, 8, 8), {}),
        (torch.bfloat16, 8, torch.ones(ROWS, HEADS, 8, 8, dtype=torch.bool), {}),
    ],
)
def test_all_else_is_the_kernels(
    dtype: torch.dtype, length: int, mask: Tensor | None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *_, **given: asked.append(given))
    query, key, value, _ = tensors(length, dtype)
    attend(LAYER, query, key, value, mask, **options)
    attend(SimpleNamespace(is_causal=False), query, key, value, mask, **options)  # type: ignore[arg-type]
    attend(LAYER, query[:, :, :1], key, value, mask, **options)  # tokens before, in a cache
    assert len(asked) == 3
    assert options.items() <= asked[0].items()


def gradient(arithmetic: torch.dtype) -> Tensor:
    """Return that of a small model which learns three whole rows, and one that begins with padding."""
    ids = torch.randint(3, 40, (4, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, 5] = -100  # which padding would predict
    model = tiny_llama()
    with autocast(torch.device("cpu"), arithmetic):
        loss = model(ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def test_a_model_learns_as_well_as_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, same = gradient(torch.bfloat16), gradient(torch.float32)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", sdpa_attention_forward)
    kernels, exact = gradient(torch.bfloat16), gradient(torch.float32)
    assert not torch.equal(ours, kernels)
    assert (ours - exact).norm() < 1.2 * (kernels - exact).norm()
    assert torch.equal(same, exact)

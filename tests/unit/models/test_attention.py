"""Attention over short rows: the kernel's numbers, as near to exact ones, and the kernel itself for all else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.integrations import sdpa_attention

from rlhf_core.models import attention
from rlhf_core.models.attention import attend, attend_to_short_rows
from rlhf_core.models.shape import SHORT_ROW
from rlhf_core.models.trunk import autocast
from tests.tiny_llama import tiny_llama

ROWS, HEADS, SHARED, SIZE, PADDING = 3, 6, 2, 8, 2
LAYER: Any = SimpleNamespace(num_key_value_groups=HEADS // SHARED, is_causal=True)


def tensors(length: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values, and the gradients of what comes out, without those of padding."""
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randn(ROWS, heads, length, SIZE, generator=generator).to(dtype)
        for heads in (HEADS, SHARED, SHARED, HEADS)
    ]
    made[3][0, :, :PADDING] = 0.0
    return [*(each.requires_grad_() for each in made[:3]), made[3].transpose(1, 2)]


def mask_of(length: int) -> Tensor:
    """Return the mask of rows of which the first begins with padding."""
    mask = torch.ones(length, length, dtype=torch.bool).tril().repeat(ROWS, 1, 1, 1)
    mask[0, :, :, :PADDING] = False
    return mask


def computed(how: Any, length: int, dtype: torch.dtype, mask: Tensor | None) -> list[Tensor]:
    """Return what comes out, and the gradients, in float64."""
    query, key, value, grad = (each.detach().to(dtype) for each in tensors(length, torch.bfloat16))
    taken = [each.requires_grad_() for each in (query, key, value)]
    found, _ = how(LAYER, *taken, mask)
    found.backward(grad)
    real = found.detach().clone()
    real[0, :PADDING] = 0.0  # whatever padding attends to
    return [each.double() for each in (real, *(each.grad for each in taken if each.grad is not None))]


@pytest.mark.parametrize("is_padded", [True, False])
@pytest.mark.parametrize("length", [2, 17, SHORT_ROW])
def test_it_is_as_near_to_exact_attention_as_the_kernel(length: int, is_padded: bool) -> None:
    mask = mask_of(length) if is_padded else None
    kernel = sdpa_attention.sdpa_attention_forward
    exact = computed(kernel, length, torch.float64, mask)
    ours, theirs = (computed(how, length, torch.bfloat16, mask) for how in (attend, kernel))
    for one, other, right in zip(ours, theirs, exact, strict=True):
        assert one.shape == right.shape
        assert (one - right).norm() <= 2 * (other - right).norm() + 1e-3 * right.norm()


@pytest.mark.parametrize(
    ("dtype", "length", "options"),
    [
        (torch.float32, 8, {}),
        (torch.bfloat16, SHORT_ROW + 1, {}),
        (torch.bfloat16, 1, {}),
        (torch.bfloat16, 8, {"dropout": 0.5}),
        (torch.bfloat16, 8, {"is_causal": False}),
        (torch.bfloat16, 8, {"attention_mask": torch.zeros(ROWS, 1, 8, 8)}),
    ],
)
def test_all_else_is_the_kernels(
    dtype: torch.dtype, length: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *_, **given: asked.append(given))
    query, key, value, _ = tensors(length, dtype)
    attend(LAYER, query, key, value, options.pop("attention_mask", None), **options)
    assert len(asked) == 1
    assert options.items() <= asked[0].items()


def gradient(arithmetic: torch.dtype, *, is_ours: bool) -> Tensor:
    """Return that of a small model which learns three whole rows, and one that begins with padding."""
    ids = torch.randint(3, 40, (4, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, 5] = -100  # which padding would predict
    model = tiny_llama()
    if is_ours:
        before = model.config.to_dict()
        attend_to_short_rows(model)
        assert model.config.to_dict() == before, "what is saved"
    with autocast(torch.device("cpu"), arithmetic):
        loss = model(ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def test_a_model_learns_as_well_as_with_the_kernel() -> None:
    exact, kernels, ours = (
        gradient(arithmetic, is_ours=is_ours)
        for arithmetic, is_ours in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True))
    )
    assert not torch.equal(ours, kernels)
    assert (ours - exact).norm() < 1.2 * (kernels - exact).norm()
    assert torch.equal(gradient(torch.float32, is_ours=True), exact)


def test_who_asked_for_another_attention_has_it() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=10, attn_implementation="eager"))
    attend_to_short_rows(model)
    assert model.config._attn_implementation == "eager"

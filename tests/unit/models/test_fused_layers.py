"""Norms, gates and rotary angles by kernels: what transformers computes, there and back."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.models import fused_layers
from rlhf_core.models.trunk import autocast, checkpoint_gradients, disable_dropout
from tests.unit.models.architectures import tiny_causal_lm

FUSED = ("llama", "mistral", "qwen2")
IDS = torch.tensor([[5, 17, 40, 99, 3, 250], [7, 8, 9, 10, 11, 12]])


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def learnt(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The logits, and the gradient of each weight."""
    model.zero_grad()
    with autocast(torch.device("cpu"), dtype):
        logits = model(IDS).logits
    logits.float().log_softmax(-1)[:, :, 3].sum().backward()
    return [logits.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


def by_transformers(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_layers, "has_kernels", lambda *_tensors: False)
        return learnt(model, dtype)


@pytest.mark.parametrize("architecture", FUSED)
@pytest.mark.parametrize("is_computed_again", [False, True])
def test_outputs_and_gradients_are_those_of_transformers(architecture: str, is_computed_again: bool) -> None:
    model = tiny_causal_lm(architecture)
    disable_dropout(model)
    if is_computed_again:
        model.train()
        checkpoint_gradients(model)
    for ours, theirs in zip(learnt(model), by_transformers(model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", FUSED)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_in_bfloat16_they_are_no_further_from_float32(architecture: str, weights: torch.dtype) -> None:
    model = tiny_causal_lm(architecture).bfloat16()
    truth = by_transformers(model.float())
    model.to(weights)
    for ours, theirs, true in zip(
        learnt(model, torch.bfloat16), by_transformers(model, torch.bfloat16), truth, strict=True
    ):
        near, far = (float((each.float() - true).norm()) for each in (ours, theirs))
        assert near < 1.3 * far + 1e-6


def test_kernels_are_what_computes() -> None:
    model = tiny_causal_lm("llama").bfloat16()
    pairs = zip(learnt(model), by_transformers(model), strict=True)
    assert not all(torch.equal(ours, theirs) for ours, theirs in pairs), "the other tests would prove little"


@pytest.mark.parametrize("angles", [(1, 5, 4), (1, 5, 8), (2, 5, 8), (1, 1, 8)])
def test_angles_of_another_shape_are_transformers_own(angles: tuple[int, ...]) -> None:
    modeling = sys.modules[type(tiny_causal_lm("llama")).__module__]
    q, k, cos, sin = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(angles), torch.randn(angles)

    def rotated() -> list[Tensor] | str:
        try:
            return list(modeling.apply_rotary_pos_emb(q, k, cos, sin))
        except RuntimeError as error:
            return str(error)

    ours = rotated()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_layers, "has_kernels", lambda *_tensors: False)
        theirs = rotated()
    if isinstance(theirs, str):
        assert ours == theirs
    else:
        torch.testing.assert_close(ours, theirs)


def test_a_norm_of_another_width_is_refused_by_transformers() -> None:
    norm = tiny_causal_lm("llama").model.norm
    with pytest.raises(RuntimeError, match="must match the size"):
        norm(torch.zeros(1, 2 * len(norm.weight)))


def test_frozen_weights_get_no_gradient() -> None:
    model = tiny_causal_lm("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name)
    for ours, theirs in zip(learnt(model), by_transformers(model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert model.model.norm.weight.grad is None

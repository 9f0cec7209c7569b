"""A layer with adapters computes what peft's does: the same sums, in fewer steps."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft.tuners import lora
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.config import LoRAConfig
from rlhf_core.models.adapted_linear import AdaptedLinear
from rlhf_core.models.base import load_base, open_base
from rlhf_core.models.lora import (
    adapters_off,
    attach_lora,
    freeze_adapters,
    set_adapter_dropout,
    trainable_parameters,
)
from rlhf_core.models.trunk import checkpoint_gradients
from tests.unit.models.architectures import ARCHITECTURES, tiny_causal_lm

torch.set_num_threads(1)

IDS = torch.tensor([[5, 17, 40, 99, 3, 250], [7, 8, 9, 10, 11, 12]])


def two_sets(model: PreTrainedModel, *, config: LoRAConfig | None = None) -> PreTrainedModel:
    """Frozen adapters and others above them, of another rank and scale, which all do something."""
    for each in (LoRAConfig(r=4, alpha=8.0), config or LoRAConfig(r=2, alpha=6.0)):
        freeze_adapters(model)
        attach_lora(model, each, seed=1)
        randomised(model, seed=each.r)
    return model


def randomised(model: PreTrainedModel, *, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)


def as_in_peft(model: PreTrainedModel) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, AdaptedLinear):
            module.__class__ = lora.Linear
    return model


def learnt(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The logits, and the gradient of each trained weight."""
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logits = model(IDS).logits
    logits.float().log_softmax(-1)[:, :, 3].sum().backward()
    return [logits.detach().float(), *(weight.grad.clone() for weight in trainable_parameters(model).values())]


def distance(found: list[Tensor], exact: list[Tensor]) -> Tensor:
    """The greatest difference in each tensor, over its greatest entry."""
    return torch.stack([(a - b).abs().max() / b.abs().max() for a, b in zip(found, exact, strict=True)])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_outputs_and_gradients_are_those_of_peft_in_float32(architecture: str) -> None:
    model = two_sets(tiny_causal_lm(architecture))
    assert any(isinstance(module, AdaptedLinear) for module in model.modules())
    ours = learnt(model)
    assert distance(ours, learnt(as_in_peft(model))).max() < 1e-5


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_they_are_so_where_weights_of_16_bits_are_widened(architecture: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny_causal_lm(architecture).to(torch.bfloat16).save_pretrained(source)
    base = open_base(source, "d" * 64, arithmetic=torch.float32, models_dir=tmp_path)
    model = two_sets(load_base(base, arithmetic=torch.float32))
    ours = learnt(model)
    assert distance(ours, learnt(as_in_peft(model))).max() < 1e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_in_bfloat16_they_are_no_further_from_float32_than_those_of_peft(architecture: str) -> None:
    model = two_sets(tiny_causal_lm(architecture))
    exact, ours = learnt(model), learnt(model, torch.bfloat16)
    theirs = learnt(as_in_peft(model), torch.bfloat16)
    assert distance(ours, exact).mean() < 1.2 * distance(theirs, exact).mean()
    assert distance(ours, exact).max() < 1.5 * distance(theirs, exact).max()


def test_dropout_is_of_the_trained_adapters_alone_as_in_peft() -> None:
    model = two_sets(tiny_causal_lm("llama"), config=LoRAConfig(r=2, alpha=6.0, dropout=0.5))
    still = learnt(model)
    set_adapter_dropout(model, active=True)
    torch.manual_seed(0)
    ours = learnt(model)
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(ours, learnt(as_in_peft(model)), strict=True))
    assert not torch.equal(ours[0], still[0])


def test_biases_learn_beside_adapters() -> None:
    model = tiny_causal_lm("qwen2")
    attach_lora(model, LoRAConfig(r=2, bias="lora_only"), seed=0)
    randomised(model)
    ours = learnt(model)
    assert distance(ours, learnt(as_in_peft(model))).max() < 1e-5
    assert any("bias" in name for name in trainable_parameters(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_new_adapters_over_a_whole_model_give_the_bits_of_the_reference(architecture: str, dtype: torch.dtype) -> None:
    model = tiny_causal_lm(architecture).to(dtype)
    attach_lora(model, LoRAConfig(r=4), seed=0)
    first = model(IDS).logits
    with adapters_off(model):
        assert torch.equal(model(IDS).logits, first)
    randomised(model)
    assert not torch.equal(model(IDS).logits, first)
    with adapters_off(model):
        assert torch.equal(model(IDS).logits, first)


def test_what_is_computed_again_gives_the_same_gradients() -> None:
    model = two_sets(tiny_causal_lm("llama"))
    passes: list[object] = []
    model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda *told: passes.append(told))
    whole = learnt(model)
    checkpoint_gradients(model.train())
    assert all(torch.equal(a, b) for a, b in zip(whole, learnt(model), strict=True))
    assert len(passes) == 3, "one of the first pass, two of the second"


def test_a_gradient_goes_through_adapters_that_are_frozen() -> None:
    model = two_sets(tiny_causal_lm("llama"))
    freeze_adapters(model)
    gradients = []
    for each in (model, as_in_peft(copy.deepcopy(model))):
        x = model.get_input_embeddings()(IDS).detach().requires_grad_()
        each(inputs_embeds=x).logits.square().sum().backward()
        gradients.append(x.grad)
    assert distance(gradients[:1], gradients[1:]).max() < 1e-5

"""Adapters that are sent apart make a plain model equal to the one that they were trained on, update after update."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from rlhf_core.coati.detached.factories import get_receivers_per_sender
from rlhf_core.coati.detached.lora import LoRAConstructor, state_dict_to
from rlhf_core.errors import ConfigError, ModelError
from tests.tiny_llama import tiny_llama


def adapted(base: nn.Module, targets: list[str]) -> nn.Module:
    model = copy.deepcopy(base)
    torch.manual_seed(0)
    return inject_adapter_in_model(LoraConfig(r=2, lora_alpha=6, target_modules=targets), model)


def learn(model: nn.Module) -> None:
    """Move every factor, as a step of training does."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            with torch.no_grad():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=16)).eval()


@pytest.mark.parametrize("piece", [1, 3, 100])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_receiver_computes_what_the_sender_does_after_every_update(kind: str, piece: int) -> None:
    # GPT-2's layers keep their weights transposed; embeddings have factors of other names.
    base = tiny_llama() if kind == "llama" else gpt2()
    targets = ["q_proj", "v_proj", "embed_tokens"] if kind == "llama" else ["c_attn", "wte"]
    sender, receiver = adapted(base, targets), copy.deepcopy(base)
    # Tied: peft adapts the embedding alone, which a plain model cannot hold apart from its head.
    sender.lm_head.weight = nn.Parameter(sender.lm_head.weight.detach().clone())
    receiver.lm_head.weight = nn.Parameter(receiver.lm_head.weight.detach().clone())
    ids = torch.tensor([[1, 2, 3, 4]])
    constructor = LoRAConstructor()
    constructor.register_lora_config(LoRAConstructor.extract_lora_config(sender))
    for _ in range(3):
        learn(sender)
        factors, rest = LoRAConstructor.filter_state_dict_lora(sender.state_dict())
        assert rest == {}
        names = sorted(factors)  # all A before all B: the two of a layer are in different pieces
        for start in range(0, len(names), piece):
            part = {name: factors[name] for name in names[start : start + piece]}
            constructor.load_state_dict_increase(receiver, constructor.reconstruct_increase(part))
        with torch.no_grad():
            torch.testing.assert_close(receiver(ids).logits, sender(ids).logits, rtol=1e-5, atol=1e-5)


def test_the_rest_of_a_state_dict_has_the_plain_models_names() -> None:
    base = tiny_llama()
    model = adapted(base, ["q_proj"])
    factors, rest = LoRAConstructor.filter_state_dict_lora(model.state_dict(), keep_non_lora=True)
    assert len(factors) == 4  # two layers
    assert rest.keys() == base.state_dict().keys()


def test_new_whole_weights_are_what_later_increases_are_added_to() -> None:
    layer = nn.Linear(2, 2, bias=False)
    constructor = LoRAConstructor()
    constructor.load_state_dict_increase(layer, {"weight": torch.ones(2, 2)})
    with torch.no_grad():
        layer.weight.zero_()
    constructor.forget_base()
    constructor.load_state_dict_increase(layer, {"weight": torch.full((2, 2), 3.0)})
    assert layer.weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    layer = nn.Linear(2, 2, bias=False)
    before = layer.weight.detach().clone()
    constructor = LoRAConstructor()
    with pytest.raises(ModelError, match="the increase of other does not fit the model"):
        constructor.load_state_dict_increase(layer, {"weight": torch.ones(2, 2), "other": torch.ones(1)})
    assert torch.equal(layer.weight, before)
    with pytest.raises(ModelError, match=r"factors came for the layer x, of which nothing is known"):
        constructor.reconstruct_increase({"x.lora_A.default.weight": before, "x.lora_B.default.weight": before})
    with pytest.raises(ModelError, match=r"y\.weight is no factor of an adapter"):
        constructor.reconstruct_increase({"y.weight": before})


def test_a_state_dict_is_cast_but_for_its_whole_numbers() -> None:
    found = state_dict_to({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int64)})
    assert [tensor.dtype for tensor in found.values()] == [torch.float16, torch.int64]
    assert state_dict_to({"a": torch.full((1,), 1e5)}, torch.bfloat16)["a"].isfinite().all()


def test_every_receiver_has_a_sender_and_the_other_way_round() -> None:
    for senders in range(1, 5):
        for receivers in range(1, 5):
            wired = [get_receivers_per_sender(each, senders, receivers, False) for each in range(senders)]
            assert {one for each in wired for one in each} == set(range(receivers))
            assert all(wired)  # nobody is idle
            idle = [get_receivers_per_sender(each, senders, receivers, True) for each in range(senders)]
            assert sorted(one for each in idle for one in each) == list(range(receivers))  # exactly one sender each
    with pytest.raises(ConfigError, match="sender 2 of 2"):
        get_receivers_per_sender(2, 2, 1, False)

"""Adapters are attached, trained, merged and switched off without touching what is below them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from rlhf_core.config import LoRAConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.actor import response_logprobs
from rlhf_core.models.critic import Critic
from rlhf_core.models.loading import load_causal_lm
from rlhf_core.models.lora import (
    adapters_off,
    attach_lora,
    load_trainable_state,
    merge_adapters,
    merged_parameters,
    save_merged,
    set_adapter_dropout,
    trainable_parameters,
    trainable_state,
)
from tests.unit.models.architectures import ARCHITECTURES, tiny_causal_lm

torch.set_num_threads(1)

CONFIG = LoRAConfig(r=4, alpha=8.0)
IDS = torch.tensor([[5, 17, 40, 99]])


def adapted(architecture: str = "llama", *, config: LoRAConfig = CONFIG) -> PreTrainedModel:
    """A model whose adapters already do something."""
    model = tiny_causal_lm(architecture)
    attach_lora(model, config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_new_adapters_change_nothing_and_freeze_the_rest(architecture: str) -> None:
    model = tiny_causal_lm(architecture)
    before = model(IDS).logits
    attach_lora(model, CONFIG, seed=0)
    assert torch.equal(model(IDS).logits, before)
    assert trainable_parameters(model)
    assert all(".lora_" in name for name in trainable_parameters(model))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_merged_weights_are_base_plus_scaled_product(architecture: str) -> None:
    base, model = tiny_causal_lm(architecture), adapted(architecture)
    layer, transposed = {
        "llama": ("model.layers.1.mlp.up_proj", False),
        "gpt2": ("transformer.h.1.mlp.c_fc", True),
        "opt": ("model.decoder.layers.1.fc1", False),
        "bloom": ("transformer.h.1.self_attention.query_key_value", False),
        "qwen2": ("model.layers.1.self_attn.k_proj", False),
        "qwen3": ("model.layers.1.self_attn.q_proj", False),
        "mistral": ("model.layers.1.mlp.down_proj", False),
    }[architecture]
    parts = dict(model.named_parameters())
    product = parts[f"{layer}.lora_B.default.weight"] @ parts[f"{layer}.lora_A.default.weight"]
    expected = dict(base.named_parameters())[f"{layer}.weight"] + (8.0 / 4) * (product.T if transposed else product)
    merged = merged_parameters(model)
    torch.testing.assert_close(merged[f"{layer}.weight"], expected, rtol=1e-6, atol=1e-6)
    assert list(merged) == [name for name, _ in base.named_parameters()]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_saved_merged_model_answers_like_the_adapted_one(architecture: str, tmp_path: Path) -> None:
    model = adapted(architecture)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    save_merged(model, tmp_path / "policy", max_shard_size="100KB")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    assert (model(IDS).logits - tiny_causal_lm(architecture)(IDS).logits).abs().max() > 0.01
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_a_model_without_adapters_is_saved_as_it_is(tmp_path: Path) -> None:
    model = tiny_causal_lm("llama")
    save_merged(model, tmp_path, dtype=torch.bfloat16)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.dtype == torch.bfloat16
    assert model.dtype == torch.float32
    assert torch.equal(plain.model.norm.weight, model.model.norm.weight.bfloat16())


def test_adapters_on_a_bfloat16_base_are_float32_and_get_gradients() -> None:
    model = tiny_causal_lm("llama").to(torch.bfloat16)
    attach_lora(model, CONFIG, seed=0)
    assert {parameter.dtype for parameter in trainable_parameters(model).values()} == {torch.float32}
    assert model.model.norm.weight.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(IDS).logits.float().square().sum().backward()
    name = "model.layers.0.mlp.up_proj.lora_B.default.weight"
    assert float(trainable_parameters(model)[name].grad.abs().max()) > 0


def test_the_seed_decides_the_adapters_and_the_global_state_stays() -> None:
    state = torch.get_rng_state()
    models = [tiny_causal_lm("llama") for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        attach_lora(model, CONFIG, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    first, again, other = (next(iter(trainable_state(model).values())) for model in models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_with_adapters_off_the_model_is_its_base() -> None:
    model = adapted()
    on = model(IDS).logits
    with adapters_off(model):
        assert torch.equal(model(IDS).logits, tiny_causal_lm("llama")(IDS).logits)
    assert torch.equal(model(IDS).logits, on)
    assert trainable_parameters(model)


def test_switching_off_what_is_not_there_is_refused() -> None:
    with (
        pytest.raises(ModelError, match="no adapters to switch off"),
        adapters_off(tiny_causal_lm("llama")),
    ):
        pass


def test_the_trainable_state_goes_round_and_holds_no_frozen_weight() -> None:
    model, other = adapted(), tiny_causal_lm("llama")
    attach_lora(other, CONFIG, seed=9)
    state = trainable_state(model)
    assert all(".lora_" in name for name in state)
    load_trainable_state(other, state)
    assert torch.equal(other(IDS).logits, model(IDS).logits)
    next(iter(state.values())).zero_()  # a copy: the model does not see this
    assert torch.equal(other(IDS).logits, model(IDS).logits)


def test_a_state_of_another_form_is_refused_and_changes_nothing() -> None:
    model = adapted()
    before = trainable_state(model)
    missing = dict(list(before.items())[1:])
    reshaped = {name: tensor[:1] for name, tensor in before.items()}
    for wrong in (missing, reshaped, before | {"unknown": torch.zeros(1)}):
        with pytest.raises(ModelError, match="does not fit the model"):
            load_trainable_state(model, wrong)
    for name, tensor in trainable_state(model).items():
        assert torch.equal(tensor, before[name])


def test_the_critics_head_trains_beside_the_adapters_of_its_trunk(tmp_path: Path) -> None:
    critic = Critic.from_causal_lm(tiny_causal_lm("llama"))
    attach_lora(critic.trunk, CONFIG, seed=0)
    assert {"head.weight", "head.bias"} < trainable_parameters(critic).keys()
    assert set(merged_parameters(critic)) == {
        name for name, _ in Critic.from_causal_lm(tiny_causal_lm("llama")).named_parameters()
    }
    critic.save_pretrained(tmp_path)
    assert AutoModel.from_pretrained(tmp_path).config.hidden_size == 64


def test_only_the_adapters_dropout_is_switched() -> None:
    model = adapted("gpt2", config=LoRAConfig(r=4, dropout=0.5))
    still = model(IDS).logits
    set_adapter_dropout(model, active=True)
    assert not torch.equal(model(IDS).logits, still)
    assert not model.transformer.drop.training
    set_adapter_dropout(model, active=False)
    assert torch.equal(model(IDS).logits, still)


def test_a_second_set_of_adapters_is_refused() -> None:
    with pytest.raises(ModelError, match="has adapters already"):
        attach_lora(adapted(), CONFIG, seed=0)


def test_targets_that_match_no_layer_are_refused() -> None:
    with pytest.raises(ModelError, match="has no layer named like"):
        attach_lora(tiny_causal_lm("llama"), LoRAConfig(target_modules=("c_attn",)), seed=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_adapters_merged_in_place_leave_the_plain_model_that_is_stored(architecture: str, tmp_path: Path) -> None:
    model = adapted(architecture)
    save_merged(model, tmp_path)
    merge_adapters(model)
    stored = dict(load_causal_lm(tmp_path, "float32").named_parameters())
    assert stored.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[name]), name
        assert parameter.requires_grad
    attach_lora(model, CONFIG, seed=5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_reference_of_ppo_is_the_stored_sft_policy_to_the_bit(architecture: str, tmp_path: Path) -> None:
    sft = adapted(architecture)
    save_merged(sft, tmp_path)
    actor = load_causal_lm(tmp_path, "float32")
    attach_lora(actor, CONFIG, seed=5)
    row = {
        "sequences": torch.tensor([[0, 5, 17, 40, 99, 3]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]]),
        "num_actions": 3,
        "temperature": 0.7,
    }
    with torch.no_grad():
        first = response_logprobs(actor, **row)
        with adapters_off(actor):
            reference = response_logprobs(actor, **row)
        stored = response_logprobs(load_causal_lm(tmp_path, "float32"), **row)
        assert torch.equal(reference, stored)
        assert torch.equal(first, reference), "KL is 0 at step 0"
        for parameter in trainable_parameters(actor).values():
            parameter.add_(0.05)
        assert not torch.equal(response_logprobs(actor, **row), stored)
        with adapters_off(actor):
            assert torch.equal(response_logprobs(actor, **row), stored), "and the reference stays"


def test_adapters_cost_no_second_copy_of_the_weights() -> None:
    def held(model: PreTrainedModel) -> dict[int, int]:
        storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
        return {storage.data_ptr(): storage.nbytes() for storage in storages}

    model = tiny_causal_lm("llama")
    before = held(model)
    attach_lora(model, CONFIG, seed=0)
    with adapters_off(model), torch.no_grad():
        model(IDS)
    after = held(model)
    assert before.items() <= after.items(), "the weights are where they were"
    adapters = sum(parameter.numel() * 4 for parameter in trainable_parameters(model).values())
    assert sum(after.values()) == sum(before.values()) + adapters


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_pissa_takes_the_leading_singular_vectors_out_of_the_base(architecture: str) -> None:
    plain, model = tiny_causal_lm(architecture), tiny_causal_lm(architecture)
    attach_lora(model, LoRAConfig(r=4, alpha=8.0, init="pissa"), seed=0)
    torch.testing.assert_close(model(IDS).logits, plain(IDS).logits, rtol=1e-4, atol=1e-4)
    name = {"llama": "model.layers.1.mlp.up_proj", "gpt2": "transformer.h.1.mlp.c_fc"}[architecture]
    left, values, right = torch.linalg.svd(plain.get_parameter(f"{name}.weight").detach(), full_matrices=False)
    rest = left[:, 4:] @ values[4:].diag() @ right[4:]
    torch.testing.assert_close(model.get_parameter(f"{name}.base_layer.weight").detach(), rest, rtol=1e-3, atol=1e-4)
    merged = merged_parameters(model)
    torch.testing.assert_close(merged[f"{name}.weight"], plain.get_parameter(f"{name}.weight"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [LoRAConfig(r=2, init="pissa"), LoRAConfig(r=2, bias="all")])
def test_adapters_that_change_more_than_themselves_are_no_reference(config: LoRAConfig) -> None:
    model = adapted("gpt2", config=config)
    with pytest.raises(ModelError, match=r"give an initial_model of its own"), adapters_off(model):
        pass


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_are_trained_where_asked(bias: str) -> None:
    model = adapted("gpt2", config=LoRAConfig(r=2, bias=bias))
    biases = {name for name in trainable_parameters(model) if ".lora_" not in name}
    assert "transformer.h.0.mlp.c_fc.base_layer.bias" in biases
    assert ("transformer.ln_f.bias" in biases) == (bias == "all")
    merged = merged_parameters(model)
    assert torch.equal(merged["transformer.h.0.mlp.c_fc.bias"], model.transformer.h[0].mlp.c_fc.base_layer.bias)

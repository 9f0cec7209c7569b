"""Adapters go to peft and come back from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlhf_core.config import LoRAConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.adapters import CONFIG_FILE, WEIGHTS_FILE, is_adapter_directory, load_adapters, save_adapters
from rlhf_core.models.critic import Critic
from rlhf_core.models.lora import adapter_config, attach_lora, trainable_parameters, trainable_state
from tests.unit.models.architectures import ARCHITECTURES, tiny_causal_lm

torch.set_num_threads(1)

IDS = torch.tensor([[5, 17, 40, 99]])
CONFIG = LoRAConfig(r=4, alpha=6.0)


def randomise(parameters) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def adapted(architecture: str = "llama", config: LoRAConfig = CONFIG) -> PreTrainedModel:
    model = tiny_causal_lm(architecture)
    attach_lora(model, config, seed=1)
    randomise(trainable_parameters(model).values())
    return model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("bias", ["none", "lora_only"])
def test_peft_loads_what_is_saved(architecture: str, bias: str, tmp_path: Path) -> None:
    model = adapted(architecture, CONFIG.model_copy(update={"bias": bias}))
    save_adapters(model, tmp_path)
    theirs = PeftModel.from_pretrained(tiny_causal_lm(architecture), tmp_path).eval()
    torch.testing.assert_close(theirs(input_ids=IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)
    assert is_adapter_directory(tmp_path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_saved_is_loaded_onto_a_plain_model_and_onto_an_adapted_one(architecture: str, tmp_path: Path) -> None:
    model = adapted(architecture)
    save_adapters(model, tmp_path)
    plain, other = tiny_causal_lm(architecture), tiny_causal_lm(architecture)
    attach_lora(other, CONFIG, seed=7)
    for again in (plain, other):
        load_adapters(again, tmp_path)
        assert torch.equal(again(IDS).logits, model(IDS).logits)
        assert trainable_state(again).keys() == trainable_state(model).keys()


def test_what_peft_saves_is_loaded(tmp_path: Path) -> None:
    settings = LoraConfig(r=3, lora_alpha=9, target_modules=r".*\.(q_proj|down_proj)", task_type="CAUSAL_LM")
    theirs = get_peft_model(tiny_causal_lm("mistral"), settings).eval()
    randomise(parameter for parameter in theirs.parameters() if parameter.requires_grad)
    theirs.save_pretrained(tmp_path)
    model = tiny_causal_lm("mistral")
    load_adapters(model, tmp_path)
    torch.testing.assert_close(model(IDS).logits, theirs(input_ids=IDS).logits, rtol=1e-5, atol=1e-5)
    config = adapter_config(model)
    assert config is not None
    assert (config.r, config.alpha) == (3, 9.0)


def test_the_adapters_of_a_critic_go_round(tmp_path: Path) -> None:
    critic, again = (Critic.from_causal_lm(tiny_causal_lm("opt")) for _ in range(2))
    attach_lora(critic.trunk, CONFIG, seed=1)
    randomise(trainable_parameters(critic.trunk).values())
    save_adapters(critic.trunk, tmp_path)
    load_adapters(again.trunk, tmp_path)
    assert torch.equal(again.trunk(IDS).last_hidden_state, critic.trunk(IDS).last_hidden_state)


def test_adapters_of_another_size_are_refused(tmp_path: Path) -> None:
    save_adapters(adapted(), tmp_path)
    other = adapted(config=LoRAConfig(r=4, alpha=8.0))
    with pytest.raises(ModelError, match="alpha 6"):
        load_adapters(other, tmp_path)


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    save_adapters(adapted("gpt2"), tmp_path)
    with pytest.raises(ModelError, match="has no layer named like"):
        load_adapters(tiny_causal_lm("llama"), tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"use_dora": True}, {"peft_type": "IA3"}, {"init_lora_weights": "pissa"}, {"rank_pattern": {"q_proj": 2}}],
)
def test_adapters_of_a_kind_that_is_not_known_are_refused(change: dict[str, object], tmp_path: Path) -> None:
    save_adapters(adapted(), tmp_path)
    file = tmp_path / CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError, match=next(iter(change))):
        load_adapters(tiny_causal_lm("llama"), tmp_path)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_truncated_file_is_named(name: str, tmp_path: Path) -> None:
    save_adapters(adapted(), tmp_path)
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match=name):
        load_adapters(tiny_causal_lm("llama"), tmp_path)


def test_what_has_no_adapters_of_its_own_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no adapters to save"):
        save_adapters(tiny_causal_lm("llama"), tmp_path)
    with pytest.raises(ModelError, match="pissa are of no use without"):
        save_adapters(adapted(config=LoRAConfig(r=4, init="pissa")), tmp_path)
    assert not is_adapter_directory(tmp_path)


def test_the_stored_base_and_its_adapters_make_the_model_again(tmp_path: Path) -> None:
    model = adapted()
    tiny_causal_lm("llama").save_pretrained(tmp_path / "base")
    save_adapters(model, tmp_path / "adapters")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    load_adapters(again, tmp_path / "adapters")
    assert torch.equal(again(IDS).logits, model(IDS).logits)

"""One frozen base under every role: mapped, shared, read-only, and missed when it changes."""

from __future__ import annotations

import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from psutil import Process
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_core.config import LoRAConfig
from rlhf_core.errors import BaseChangedError, ModelError
from rlhf_core.models import base as bases
from rlhf_core.models.adapters import (
    BELOW,
    WEIGHTS_FILE,
    load_adapters,
    read_adapters,
    read_joined,
    save_adapters,
    write_adapters,
)
from rlhf_core.models.base import ALIGNMENT, WEIGHTS, Base, check_bases, load_base, open_base, over_same_weights
from rlhf_core.models.critic import Critic
from rlhf_core.models.loading import load_causal_lm, model_digest
from rlhf_core.models.lora import (
    adapters_off,
    attach_lora,
    freeze_adapters,
    frozen_adapters,
    merged_parameters,
    trainable_parameters,
)
from rlhf_core.models.trunk import trunk_of
from tests.unit.models.architectures import ARCHITECTURES, tiny_causal_lm

torch.set_num_threads(1)

IDS = torch.tensor([[5, 17, 40, 99]])
CONFIG = LoRAConfig(r=4, alpha=8.0)


def opened(
    tmp_path: Path,
    architecture: str = "llama",
    *,
    published: torch.dtype = torch.bfloat16,
    arithmetic: torch.dtype = torch.bfloat16,
) -> Base:
    source = tmp_path / f"{architecture}-{published}"
    if not source.is_dir():
        tiny_causal_lm(architecture).to(published).save_pretrained(source)
    return open_base(source, model_digest(source), arithmetic=arithmetic, models_dir=tmp_path / "models")


def randomised(model: PreTrainedModel, seed: int = 2) -> PreTrainedModel:
    """Give trained adapters values, so that they do something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_base_is_the_model_that_it_was_copied_from(architecture: str, tmp_path: Path) -> None:
    base = opened(tmp_path, architecture)
    model = load_base(base, arithmetic=torch.bfloat16)
    source = load_causal_lm(tmp_path / f"{architecture}-torch.bfloat16", "bfloat16")
    assert torch.equal(model(IDS).logits, source(IDS).logits)
    assert not trainable_parameters(model)
    for name, parameter in source.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_arithmetic_in_float32_widens_no_matrix_and_gives_the_wide_models_numbers(
    architecture: str, tmp_path: Path
) -> None:
    base = opened(tmp_path, architecture, arithmetic=torch.float32)
    assert base.dtype == torch.bfloat16
    model = load_base(base, arithmetic=torch.float32)
    wide = load_causal_lm(tmp_path / f"{architecture}-torch.bfloat16", "float32")
    assert model(IDS).logits.dtype == torch.float32
    torch.testing.assert_close(model(IDS).logits, wide(IDS).logits, rtol=1e-5, atol=1e-5)
    matrices = [module.weight for module in model.modules() if isinstance(module, (nn.Linear, Conv1D))]
    assert {matrix.dtype for matrix in matrices} == {torch.bfloat16}
    embedded = [torch.randn(1, 4, model.config.hidden_size, requires_grad=True)]
    embedded.append(embedded[0].detach().clone().requires_grad_())
    for each, inputs in zip((model, wide), embedded, strict=True):
        each(inputs_embeds=inputs).logits.square().sum().backward()
    torch.testing.assert_close(embedded[0].grad, embedded[1].grad, rtol=1e-4, atol=1e-4)


def test_a_float32_model_is_copied_in_the_arithmetic_of_the_run(tmp_path: Path) -> None:
    narrow = opened(tmp_path, published=torch.float32)
    exact = opened(tmp_path, published=torch.float32, arithmetic=torch.float32)
    assert (narrow.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
    source = load_causal_lm(tmp_path / "llama-torch.float32", "float32")
    assert torch.equal(load_base(exact, arithmetic=torch.float32)(IDS).logits, source(IDS).logits)
    rounded = load_causal_lm(tmp_path / "llama-torch.float32", "bfloat16")
    assert torch.equal(load_base(narrow, arithmetic=torch.bfloat16)(IDS).logits, rounded(IDS).logits)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tensors_are_aligned_and_what_is_joined_lies_side_by_side(architecture: str, tmp_path: Path) -> None:
    base = opened(tmp_path, architecture)
    raw = (base.directory / WEIGHTS).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    places = {name: each["data_offsets"] for name, each in header.items() if name != "__metadata__"}
    assert (8 + length) % 4096 == 0
    assert all((8 + length + begin) % ALIGNMENT == 0 for name, (begin, _) in places.items() if "gap." not in name)
    with safe_open(base.directory / WEIGHTS, "pt") as opened_file:  # the format's own reader takes it
        assert opened_file.keys()
    for parts in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        names = [f"model.layers.1.{part}.weight" for part in parts]
        if names[0] in places and names[-1] in places:
            for first, second in pairwise(names):
                assert places[first][1] == places[second][0], (first, second)


@pytest.mark.parametrize("offset", [0, 2, 10, 62, 64, 2050])
def test_no_bit_depends_on_where_a_tensor_lies(offset: int) -> None:
    generator = torch.Generator().manual_seed(offset)
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.randn(96, 200, generator=generator).to(dtype)
        inputs = torch.randn(7, 200, generator=generator).to(dtype)
        room = torch.zeros(matrix.nbytes + offset + 4, dtype=torch.uint8)
        begin = -(-offset // dtype.itemsize) * dtype.itemsize
        moved = room[begin : begin + matrix.nbytes].view(dtype).view_as(matrix).copy_(matrix)
        assert torch.equal(inputs @ moved.T, inputs @ matrix.T)


def test_roles_share_the_tensors_and_not_the_adapters(tmp_path: Path) -> None:
    actor = load_base(opened(tmp_path), arithmetic=torch.bfloat16)
    other = over_same_weights(actor)
    before = other(IDS).logits
    attach_lora(actor, CONFIG, seed=0)
    randomised(actor)
    assert torch.equal(other(IDS).logits, before)
    assert not torch.equal(actor(IDS).logits, before)
    own = {parameter.data_ptr() for name, parameter in actor.named_parameters() if "lora_" not in name}
    assert own == {parameter.data_ptr() for parameter in other.parameters()}


def stages(tmp_path: Path, architecture: str = "llama", arithmetic: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """SFT's adapters, frozen, and over them new ones."""
    model = load_base(opened(tmp_path, architecture, arithmetic=arithmetic), arithmetic=arithmetic)
    attach_lora(model, CONFIG, seed=0)
    randomised(model)
    freeze_adapters(model)
    attach_lora(model, LoRAConfig(r=2, alpha=6.0), seed=1)
    return model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_frozen_adapters_answer_as_trained_ones_did_and_new_ones_change_nothing(
    architecture: str, tmp_path: Path
) -> None:
    model = load_base(opened(tmp_path, architecture), arithmetic=torch.bfloat16)
    attach_lora(model, CONFIG, seed=0)
    before = randomised(model)(IDS).logits
    freeze_adapters(model)
    assert torch.equal(model(IDS).logits, before)
    assert not trainable_parameters(model)
    attach_lora(model, CONFIG, seed=1)
    assert torch.equal(model(IDS).logits, before)  # KL is exactly 0 at the start
    randomised(model, seed=3)
    assert not torch.equal(model(IDS).logits, before)
    with adapters_off(model):
        assert torch.equal(model(IDS).logits, before)


def test_frozen_adapters_get_no_gradient(tmp_path: Path) -> None:
    model = stages(tmp_path)
    model(input_ids=IDS, labels=IDS).loss.backward()
    got = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert got
    assert got == trainable_parameters(model).keys()
    assert all(".default." in name for name in got)


def test_adapters_of_stages_are_joined_by_rank(tmp_path: Path) -> None:
    model = randomised(stages(tmp_path, arithmetic=torch.float32), seed=5)
    before, merged = model(IDS).logits, merged_parameters(model, dtype=torch.float32)
    freeze_adapters(model)
    joined = frozen_adapters(model)
    assert joined is not None
    assert (joined.rank, joined.alpha / joined.rank) == (6, 2.0)
    torch.testing.assert_close(model(IDS).logits, before, rtol=1e-5, atol=1e-5)
    for name, weight in merged_parameters(model, dtype=torch.float32).items():
        torch.testing.assert_close(weight, merged[name], rtol=1e-6, atol=1e-6)


def test_stored_adapters_come_back_with_those_below_and_joined_for_peft(tmp_path: Path) -> None:
    from peft import PeftModel

    model = randomised(stages(tmp_path, arithmetic=torch.float32), seed=5)
    save_adapters(model, tmp_path / "policy")
    again = load_base(opened(tmp_path), arithmetic=torch.float32)
    load_adapters(again, tmp_path / "policy")
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert trainable_parameters(again).keys() == trainable_parameters(model).keys()
    write_adapters(read_joined(tmp_path / "policy"), tmp_path / "joined", task_type="CAUSAL_LM")
    source = AutoModelForCausalLM.from_pretrained(tmp_path / "llama-torch.bfloat16", dtype=torch.float32)
    theirs = PeftModel.from_pretrained(source, tmp_path / "joined").eval()
    torch.testing.assert_close(theirs(input_ids=IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)


def test_a_reward_model_stores_what_is_below_its_adapters_as_the_policy_did(tmp_path: Path) -> None:
    """The same bytes, which the store has once; an earlier release's have the names of a transformer without a head."""
    policy = randomised(stages(tmp_path, arithmetic=torch.float32), seed=5)
    save_adapters(policy, tmp_path / "policy")
    trunk = trunk_of(policy)
    save_adapters(trunk, tmp_path / "reward-model")
    stored = tmp_path / "reward-model" / BELOW
    assert (stored / WEIGHTS_FILE).read_bytes() == (tmp_path / "policy" / BELOW / WEIGHTS_FILE).read_bytes()
    below = frozen_adapters(trunk)
    assert below is not None
    for _ in range(2):
        again = trunk_of(load_base(opened(tmp_path), arithmetic=torch.float32))
        load_adapters(again, tmp_path / "reward-model")
        assert torch.equal(again(IDS).last_hidden_state, trunk(IDS).last_hidden_state)
        assert read_joined(tmp_path / "reward-model").factors.keys() == below.factors.keys()
        write_adapters(below, stored)  # as an earlier release did


def test_what_is_below_several_models_is_in_memory_once(tmp_path: Path) -> None:
    save_adapters(randomised(stages(tmp_path), seed=5), tmp_path / "policy")
    save_adapters(randomised(stages(tmp_path), seed=6), tmp_path / "other")
    with torch.no_grad():  # another stage below it
        other = read_adapters(tmp_path / "other" / BELOW)
        write_adapters(
            other._replace(alpha=1.0, factors={n: (a, b + 1) for n, (a, b) in other.factors.items()}),
            tmp_path / "other" / BELOW,
            task_type="CAUSAL_LM",
        )
    models = [load_base(opened(tmp_path), arithmetic=torch.bfloat16) for _ in range(3)]
    for model, name in zip(models, ("policy", "policy", "other"), strict=True):
        load_adapters(model, tmp_path / name)
    places = [{b.data_ptr() for name, b in model.named_parameters() if ".lora_B.below." in name} for model in models]
    assert places[0] == places[1]
    assert places[0].isdisjoint(places[2])


def test_equal_factors_of_one_model_are_stored(tmp_path: Path) -> None:
    """As where SFT changed nothing: B is 0 in all layers."""
    model = load_base(opened(tmp_path), arithmetic=torch.bfloat16)
    attach_lora(model, CONFIG, seed=0)
    freeze_adapters(model)
    attach_lora(model, CONFIG, seed=1)
    save_adapters(model, tmp_path / "policy")
    again = load_base(opened(tmp_path), arithmetic=torch.bfloat16)
    load_adapters(again, tmp_path / "policy")
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_adapters_of_another_model_do_not_go_below(tmp_path: Path) -> None:
    save_adapters(randomised(stages(tmp_path, "gpt2")), tmp_path / "policy")
    with pytest.raises(ModelError, match="do not fit this LlamaForCausalLM"):
        load_adapters(tiny_causal_lm("llama"), tmp_path / "policy")


def test_a_copy_is_made_once_and_again_when_it_was_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = opened(tmp_path)
    assert opened(tmp_path) == first
    role = Critic(over_same_weights(trunk_of(load_base(first, arithmetic=torch.bfloat16))))
    check_bases(role, None)
    file = first.directory / WEIGHTS
    assert file.stat().st_mode & 0o777 == 0o444
    file.chmod(0o644)
    with file.open("r+b") as stream:
        stream.truncate(5000)
    with pytest.raises(BaseChangedError, match="was changed or removed while it was in use"):
        check_bases(role)
    assert not caplog.messages
    second = opened(tmp_path)
    assert f"{first.directory}, the base that models share, was changed since it was written: it is" in caplog.text
    second.check_unchanged()
    assert torch.isfinite(load_base(second, arithmetic=torch.bfloat16)(IDS).logits).all()


def test_a_copy_that_is_removed_is_missed(tmp_path: Path) -> None:
    base = opened(tmp_path)
    (base.directory / WEIGHTS).unlink()
    with pytest.raises(BaseChangedError, match=r"model\.safetensors, the base that the models of this run share"):
        base.check_unchanged()


def test_a_disk_without_room_is_told_before_anything_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(ModelError, match="GB are free; make room"):
        opened(tmp_path)
    assert [each.name for each in (tmp_path / "models" / "bases").iterdir() if not each.name.endswith(".lock")] == []


def test_copies_that_nobody_used_for_a_week_go(tmp_path: Path) -> None:
    old, kept = opened(tmp_path), opened(tmp_path, "gpt2")
    os.utime(old.directory / "used", (0, 0))
    opened(tmp_path, "opt")
    assert not old.directory.exists()
    assert kept.directory.exists()


def test_what_a_killed_copy_left_goes_and_a_directory_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    base = opened(tmp_path)
    left = base.directory.parent / f".copying-{base.directory.name}-abc"
    left.mkdir()
    (left / WEIGHTS).write_bytes(b"half")
    (base.directory / WEIGHTS).unlink()
    opened(tmp_path)
    assert not left.exists()
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"the base of .* cannot be copied to .*: Not a directory"):
        open_base(tmp_path / "llama-torch.bfloat16", "d", arithmetic=torch.bfloat16, models_dir=tmp_path / "file")


def test_arithmetic_in_float32_is_kept_under_autocast(tmp_path: Path) -> None:
    model = load_base(opened(tmp_path, arithmetic=torch.float32), arithmetic=torch.float32)
    embedded = torch.randn(1, 4, model.config.hidden_size, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(inputs_embeds=embedded).logits.square().mean()
    loss.backward()
    assert embedded.grad is not None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux drops pages that are mapped")
def test_what_was_copied_leaves_memory() -> None:
    with TemporaryDirectory(dir="/var/tmp") as place:  # on a disk: what lies in memory has nowhere to go
        file = Path(place) / "mapped"
        file.write_bytes(bytes(1 << 22))
        os.sync()  # a page that is not yet on the disk stays
        mapped = torch.from_file(str(file), size=1 << 22, dtype=torch.uint8)
        assert mapped.sum() == 0
        before = Process().memory_info().shared
        bases._let_go(mapped)
        assert before - Process().memory_info().shared > 3 << 20
        assert mapped.sum() == 0, "it is read again"

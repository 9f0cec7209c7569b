"""DDP and ZeRO-2 in a group of one; tests/parallel/test_zero.py has them on two ranks."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaForCausalLM

from rlhf_core.config import LoRAConfig
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.models.lora import attach_lora, trainable_parameters
from rlhf_core.strategy.colossal.booster import ColossalBooster
from rlhf_core.strategy.colossal.compat import upstream
from rlhf_core.strategy.colossal.compat.zero import OrderedZero
from rlhf_core.strategy.colossal.ddp import DDPBooster
from rlhf_core.strategy.colossal.zero import ZeroBooster
from rlhf_core.strategy.optimizer import GradientError
from rlhf_core.strategy.plain import PlainBooster
from rlhf_core.strategy.ranks import ALONE, join_alone, leave
from tests.parallel.zero_model import (
    CLIP,
    OTHER_LR,
    STEPS,
    Assorted,
    assorted,
    boosted,
    gradient_pass,
    gradients,
    rows,
    teach,
)
from tests.tiny_llama import tiny_llama

pytestmark = [
    pytest.mark.usefixtures("alone"),
    # pytest undoes, before each test, what `upstream` did about it.
    pytest.mark.filterwarnings("ignore:.*torch.distributed.(reduce_scatter|all_gather_into)_tensor:FutureWarning"),
]

BOTH = [DDPBooster, ZeroBooster]


def made(kind: Any, precision: str = "fp32", **settings: Any) -> tuple[Any, Any, Any]:
    booster = kind(precision, CLIP, ALONE, **settings)
    return booster, *boosted(booster, assorted(ALONE))


@pytest.mark.parametrize(
    ("kind", "settings"), [(DDPBooster, {}), (ZeroBooster, {}), (ZeroBooster, {"cpu_offload": True})]
)
def test_five_steps_are_plain_torchs(kind: type[ColossalBooster], settings: dict[str, bool]) -> None:
    plain = made(PlainBooster)
    expected = teach(*plain)
    booster, model, optimizer = made(kind, **settings)
    gradients(booster, model, optimizer, 4)
    optimizer.zero_grad()  # of a step that was left out, nothing is left
    taught = teach(booster, model, optimizer)
    assert taught.numbers == pytest.approx(expected.numbers, rel=1e-5)
    for name, gradient in expected.first.items():
        torch.testing.assert_close(taught.first[name], gradient, rtol=0, atol=1e-5 * gradient.abs().max().item())
    held, wanted = booster.weights(model), plain[0].weights(plain[1])
    assert held.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(held[name], weight, rtol=0, atol=STEPS * OTHER_LR)
    assert torch.equal(held["of_none"], torch.ones(5, 3))  # which its decay would have moved
    gradient_pass(booster, model, optimizer, rows(0, ALONE)[1::2])  # without an even row
    optimizer.step()
    last = booster.weights(model)
    assert torch.equal(last["of_even_rows"], held["of_even_rows"])
    assert not torch.equal(last["odd"], held["odd"])


@pytest.mark.parametrize("offloaded", [False, True])
def test_masters_are_on_the_host_if_asked_for(monkeypatch: pytest.MonkeyPatch, offloaded: bool) -> None:
    """With a device that is not the host: meta, as a CPU has no other."""
    settings = ZeroBooster("fp32", CLIP, ALONE, cpu_offload=offloaded).upstream.plugin.zero_optim_kwargs
    kind = type(upstream("colossalai.accelerator").get_accelerator())
    monkeypatch.setattr(kind, "get_current_device", lambda _: torch.device("meta"))
    zero = OrderedZero(torch.optim.AdamW(tiny_llama().parameters()), **settings)
    assert {master.device.type for master in zero.masters} == {"cpu" if offloaded else "meta"}


@pytest.mark.parametrize("kind", BOTH)
def test_a_schedule_that_was_boosted_sets_the_rates_and_goes_on_from_a_file(kind: Any, tmp_path: Path) -> None:
    def run(booster: Any, steps: int, betas: tuple[float, float] = (0.9, 0.99)) -> tuple[Any, Any, Any]:
        model = assorted(ALONE)
        optimizer = booster.new_optimizer([{"params": list(model.parameters()), "lr": 1e-3}], betas=betas)
        schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        model, wrapped, _, _, schedule = booster.boost(model, optimizer, lr_scheduler=schedule)
        for step in range(steps):
            teach(booster, model, wrapped, [step])
            schedule.step()
        return booster.weights(model), wrapped, schedule

    wanted, *_ = run(PlainBooster("fp32", CLIP, ALONE), 3)
    booster = kind("fp32", CLIP, ALONE)
    found, wrapped, schedule = run(booster, 3)
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-5)
    booster.save_lr_scheduler(schedule, str(tmp_path / "schedule"))
    booster.save_optimizer(wrapped, str(tmp_path / "optimizer"))
    for into in ("schedule", "optimizer"):
        other = kind("fp32", CLIP, ALONE)
        _, optimizer, fresh = run(other, 0, betas=(0.5, 0.5))
        if into == "schedule":
            other.load_lr_scheduler(fresh, str(tmp_path / "schedule"))
            assert fresh.get_last_lr() == schedule.get_last_lr() == [1e-3 / 4]
        else:
            other.load_optimizer(optimizer, str(tmp_path / "optimizer"))
            assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)
        assert optimizer.param_groups[0]["lr"] == 1e-3 / 4


def test_masters_are_the_weights_before_they_were_rounded() -> None:
    booster, model, _ = made(ZeroBooster, "bf16")
    given = dict(assorted(ALONE).named_parameters())
    held = booster.weights(model)
    assert held.keys() == given.keys()
    assert all(torch.equal(tensor, given[name]) for name, tensor in held.items())
    working = dict(booster.plain(model).named_parameters())
    assert all(torch.equal(tensor, given[name].bfloat16()) for name, tensor in working.items())


def test_the_exact_model_is_a_float32_copy_that_leaves_the_working_one_as_it_is() -> None:
    booster, model, _ = made(ZeroBooster, "bf16")
    plain = booster.plain(model)
    with booster.exact(model) as whole:
        assert isinstance(whole, Assorted)
        assert {tensor.dtype for tensor in whole.state_dict().values()} == {torch.float32}
        assert whole.llama.lm_head.weight is whole.llama.model.embed_tokens.weight
        ids = rows(0, ALONE)
        with torch.no_grad():
            torch.testing.assert_close(whole(ids), assorted(ALONE)(ids))
            whole.odd.fill_(9.0)
    assert {parameter.dtype for parameter in plain.parameters()} == {torch.bfloat16}
    assert plain.odd.max() < 1
    booster, model, _ = made(DDPBooster)
    with booster.exact(model) as whole:
        assert whole is booster.plain(model)  # no copy where none is needed


@pytest.mark.parametrize("kind", BOTH)
def test_weights_that_are_loaded_are_trained_on(kind: Any) -> None:
    """As when a head is rescaled before the first step."""
    wanted = made(PlainBooster)
    found = made(kind)
    for booster, model, optimizer in (wanted, found):
        old = booster.weights(model, ["odd", "single"])
        booster.load_weights(model, {name: tensor * 2 for name, tensor in old.items()})
        teach(booster, model, optimizer, [0])
    held = found[0].weights(found[1])
    for name, weight in wanted[0].weights(wanted[1]).items():
        torch.testing.assert_close(held[name], weight, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", BOTH)
def test_losses_scaled_for_float16_take_the_same_steps_and_shrink_after_an_overflow(kind: Any, tmp_path: Path) -> None:
    def scaled() -> tuple[Any, Any, Any]:
        booster = kind("fp32", CLIP, ALONE)
        booster.precision = "fp16"  # float16 itself needs a GPU; its scale does not
        return booster, *boosted(booster, assorted(ALONE))

    plain = made(PlainBooster)
    booster, model, optimizer = scaled()
    optimizer.scale.factor = 1e39
    gradients(booster, model, optimizer, 1)
    optimizer.make_ready()
    assert optimizer.last_step_skipped
    optimizer.step()
    assert not math.isfinite(optimizer.get_grad_norm())
    assert optimizer.scale.factor == 5e38
    optimizer.scale.factor = 1024.0
    expected, taught = teach(*plain), teach(booster, model, optimizer)
    assert taught.numbers == pytest.approx(expected.numbers, rel=1e-5)
    assert optimizer.scale.good_steps == STEPS
    booster.save_optimizer(optimizer, str(tmp_path / "optimizer"))
    other, again, fresh = scaled()
    other.load_optimizer(fresh, str(tmp_path / "optimizer"))
    assert fresh.scale.facts() == {"factor": 1024.0, "good_steps": STEPS}
    fresh.scale.factor = 1.0
    gradients(other, again, fresh, 1)
    other.plain(again).odd.register_hook(lambda grad: grad * math.inf)
    gradients(other, again, fresh, 1)
    with pytest.raises(GradientError):  # nothing smaller is left to try
        fresh.make_ready()


def test_a_directory_of_shards_is_one_that_transformers_loads(tmp_path: Path) -> None:
    booster = ZeroBooster("bf16", 1.0, ALONE)
    llama = tiny_llama(seed=3)
    given = {name: tensor.clone() for name, tensor in llama.state_dict().items()}
    optimizer = booster.new_optimizer([{"params": list(llama.parameters())}], betas=(0.9, 0.95))
    model, wrapped, *_ = booster.boost(llama, optimizer)
    booster.save_model(model, str(tmp_path), shard=True, size_per_shard=1)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32
    assert all(torch.equal(tensor, given[name]) for name, tensor in loaded.state_dict().items())
    booster.load_weights(model, {"model.norm.weight": torch.zeros(64)})
    booster.load_model(model, str(tmp_path))
    assert torch.equal(booster.weights(model)["model.norm.weight"], torch.ones(64))
    booster.backward(model(input_ids=rows(0, ALONE)).logits.float().square().mean(), wrapped)
    wrapped.step()
    assert not torch.equal(booster.weights(model)["model.norm.weight"], torch.ones(64))


def test_adapters_are_stored_merged_and_apart(tmp_path: Path) -> None:
    booster = ZeroBooster("bf16", 1.0, ALONE)
    llama = tiny_llama(seed=3)
    attach_lora(llama, LoRAConfig(r=2, alpha=4.0), seed=0)
    optimizer = booster.new_optimizer([{"params": list(trainable_parameters(llama).values())}], betas=(0.9, 0.95))
    model, wrapped, *_ = booster.boost(llama, optimizer)
    for _ in range(2):
        booster.backward(model(input_ids=rows(0, ALONE)).logits.float().square().mean(), wrapped)
        wrapped.step()
        wrapped.zero_grad()
    held = booster.weights(model)
    assert all(".lora_" in name and tensor.any() for name, tensor in held.items())
    booster.save_model(model, str(tmp_path), shard=True)
    name = "model.layers.0.self_attn.q_proj"
    a, b = (held[f"{name}.lora_{side}.default.weight"] for side in "AB")
    base = dict(llama.named_parameters())[f"{name}.base_layer.weight"].float()  # frozen, and rounded
    merged = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()[f"{name}.weight"]
    torch.testing.assert_close(merged, base + 2.0 * b @ a)
    booster.load_weights(model, {key: torch.zeros_like(tensor) for key, tensor in held.items()})
    booster.load_model(model, str(tmp_path))
    assert all(torch.equal(tensor, held[key]) for key, tensor in booster.weights(model).items())


@pytest.mark.parametrize("kind", BOTH)
def test_what_does_not_fit_is_refused(kind: Any, tmp_path: Path) -> None:
    booster, model, optimizer = made(kind)
    booster.save_model(model, str(tmp_path / "model"))
    booster.save_optimizer(optimizer, str(tmp_path / "optimizer"))
    with pytest.raises(ConfigError, match="make one booster for each model"):
        booster.boost(tiny_llama())
    other = kind("fp32", CLIP, ALONE)
    llama = tiny_llama()
    with pytest.raises(ConfigError, match="got 0 of them and 1 others"):
        other.boost(llama, torch.optim.AdamW([nn.Parameter(torch.ones(2))]))
    other = kind("fp32", CLIP, ALONE)
    boosted_llama, wrapped, *_ = other.boost(llama, torch.optim.AdamW(llama.parameters()))
    with pytest.raises(ModelError, match="does not fit the model"):
        other.load_model(boosted_llama, str(tmp_path / "model"))
    with pytest.raises(ModelError, match="belongs to other weights"):
        other.load_optimizer(wrapped, str(tmp_path / "optimizer"))
    with pytest.raises(ConfigError, match="optimizer that this booster's boost returned"):
        other.save_optimizer(torch.optim.AdamW(llama.parameters()), str(tmp_path / "other"))


def test_what_cannot_be_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="expected precision fp32, bf16 or fp16, got 'fp8'"):
        DDPBooster("fp8")  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="fp16 needs a GPU"):
            ZeroBooster("fp16")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "colossalai.booster", None)
        with pytest.raises(ConfigError, match=r"cannot be imported .* run `make setup`"):
            DDPBooster()
    model = assorted(ALONE)
    model.odd.data = model.odd.data.half()
    with pytest.raises(ConfigError, match="ZeRO trains weights of one dtype"):
        boosted(ZeroBooster("fp32", CLIP, ALONE), model)


def test_a_group_must_be_there() -> None:
    leave()
    try:
        with pytest.raises(ConfigError, match="need a process group"):
            DDPBooster()
    finally:
        join_alone()

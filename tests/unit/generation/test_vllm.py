"""vLLM holds what the model holds, adapters too, and leaves the process as it was; where it is absent, that is said.

What every engine promises is in test_engine.py and test_responses.py.
"""

from __future__ import annotations

import copy
import gc
import random
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rlhf_core.config import LoRAConfig
from rlhf_core.errors import ConfigError
from rlhf_core.generation import GenerationSettings, make_engine, vllm_engine
from rlhf_core.generation.responses import Responses
from rlhf_core.generation.sampling import Choice
from rlhf_core.models.lora import (
    addable_adapters,
    attach_lora,
    each_merged,
    freeze_adapters,
    trainable_parameters,
    weights_below,
)
from tests.unit.generation.test_engine import PROMPTS, assert_same, decode, numbers, responses
from tests.unit.generation.wide import IN_VLLM, needs_vllm, wide_causal_lm
from tests.unit.models.architectures import tiny_causal_lm


def made_the_same(model: PreTrainedModel, **changes: Any) -> None:
    ours, theirs = (decode(model, engine=engine, uniforms=numbers(), **changes) for engine in ("native", "vllm"))
    assert_same(ours, theirs)


def change(model: PreTrainedModel, seed: int) -> None:
    """Change what is trained, in place."""
    with torch.no_grad():
        for number, weight in enumerate(trainable_parameters(model).values()):
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed + number)), alpha=0.1)


def test_where_it_is_not_installed_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "find_spec", lambda _: None)
    with pytest.raises(
        ConfigError, match=r"needs the package vllm, which is not installed; .* or set ppo.engine to native"
    ):
        make_engine("vllm", tiny_causal_lm("llama"))


@needs_vllm
@pytest.mark.parametrize("architecture", IN_VLLM)
@pytest.mark.parametrize("kind", ["whole", "adapters", "over others", "biases"])
def test_it_holds_the_weights_of_now(kind: str, architecture: str) -> None:
    model = wide_causal_lm(architecture)
    if kind == "over others":
        attach_lora(model, LoRAConfig(r=4, alpha=12), seed=1)
        change(model, 10)
        freeze_adapters(model)
    if kind != "whole":
        attach_lora(model, LoRAConfig(r=8, alpha=8, bias="all" if kind == "biases" else "none"), seed=2)
    before = responses(decode(model, engine="vllm", uniforms=numbers()))
    for seed in (20, 40):
        change(model, seed)
        made_the_same(model)
    assert responses(decode(model, uniforms=numbers())) != before


@needs_vllm
def test_a_longer_batch_and_other_arithmetic_are_served_too() -> None:
    model = wide_causal_lm("llama")
    made_the_same(model)
    first = vllm_engine._served[model]
    made_the_same(model, prompts=[[5, 6] * 200, *PROMPTS[1:]])
    assert vllm_engine._served[model] is not first
    with torch.autocast("cpu", torch.bfloat16):
        generation = decode(model, engine="vllm", uniforms=numbers())
    assert vllm_engine._served[model].dtype == torch.bfloat16
    assert generation.log_probs.dtype == torch.float32


@needs_vllm
def test_rows_that_the_cache_has_no_room_for_wait_or_begin_again() -> None:
    model = wide_causal_lm("llama")
    decode(model, [[5]] * 61, engine="vllm", max_new_tokens=100)  # one block for each row
    rows = [*PROMPTS * 12, [5, 6, 7] * 40]
    uniforms = torch.rand(61, 130, generator=torch.Generator().manual_seed(0))
    first = vllm_engine._served[model]
    ours, theirs = (
        decode(model, rows, engine=engine, uniforms=uniforms, max_new_tokens=130) for engine in ("native", "vllm")
    )
    assert vllm_engine._served[model] is first
    assert_same(ours, theirs)


@needs_vllm
def test_a_larger_batch_is_not_made_in_turns() -> None:
    model = wide_causal_lm("llama")
    decode(model, PROMPTS[:1], engine="vllm")
    made_the_same(model)
    assert vllm_engine._served[model].rows == len(PROMPTS)


@needs_vllm
def test_prompts_that_are_read_in_parts_are_answered_as_others() -> None:
    model = wide_causal_lm("llama")
    rows = [[5, 6, 7, number] * 200 for number in range(8, 13)]  # 4,000 tokens, and 2,048 in a step
    ours, theirs = (decode(model, rows, engine=engine, uniforms=numbers()) for engine in ("native", "vllm"))
    assert_same(ours, theirs)


@needs_vllm
def test_one_short_row_is_answered_in_a_window() -> None:
    model = wide_causal_lm("mistral")
    ours, theirs = (decode(model, PROMPTS[:1], engine=engine, uniforms=numbers()[:1]) for engine in ("native", "vllm"))
    assert_same(ours, theirs)


@needs_vllm
def test_in_16_bits_it_is_about_as_near_to_float32_as_our_own_loop() -> None:
    model = wide_causal_lm("llama")
    prompts = [[number, 5, 6, number % 7 + 3] for number in range(3, 103)]
    exact = decode(model, prompts, max_new_tokens=1)
    ours, theirs = (
        decode(copy.deepcopy(model).bfloat16(), prompts, engine=engine, max_new_tokens=1)
        for engine in ("native", "vllm")
    )
    off = []
    for made in (ours, theirs):
        same = made.sequences[:, -1] == exact.sequences[:, -1]
        assert same.float().mean() > 0.9
        off.append((made.log_probs - exact.log_probs)[same].abs().mean())
    assert off[1] <= 1.5 * off[0]


@needs_vllm
def test_the_process_is_left_as_it_was() -> None:
    model, set_threads = wide_causal_lm("llama"), torch.set_num_threads
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    threads = torch.get_num_threads()
    decode(model, engine="vllm")
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]
    assert (np.random.get_state()[1] == drawn[2]).all()
    assert torch.set_num_threads is set_threads
    assert torch.get_num_threads() == threads
    assert gc.get_freeze_count() == 0


@needs_vllm
@pytest.mark.parametrize("adapted", [False, True])
def test_nothing_is_kept_for_a_model_that_is_gone_and_others_go_on(adapted: bool) -> None:
    gone, stays = wide_causal_lm("llama"), wide_causal_lm("qwen2")
    if adapted:
        attach_lora(gone, LoRAConfig(r=4), seed=1)
    for model in (gone, stays):
        decode(model, engine="vllm")
    runner = vllm_engine._served[gone].core.engine_core.model_executor.driver_worker.worker.model_runner
    held = weakref.ref(runner.get_model())
    del gone, model, runner
    gc.collect()
    assert held() is None
    made_the_same(stays)


@needs_vllm
def test_after_an_error_the_next_batch_is_whole() -> None:
    model = wide_causal_lm("llama")
    good = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(Exception, match="not finite numbers"):
        decode(model, engine="vllm")
    with torch.no_grad():
        model.lm_head.weight.copy_(good)
    made_the_same(model)


@needs_vllm
def test_a_model_that_it_cannot_have_is_refused() -> None:
    model = tiny_causal_lm("bloom", hidden_size=128)
    with pytest.raises(ConfigError, match=r"vllm cannot have BloomForCausalLM in torch\.float32 .*; set ppo.engine to"):
        decode(model, engine="vllm")


@needs_vllm
def test_a_model_of_which_it_leaves_something_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        vllm_engine, "each_merged", lambda model: [each for each in each_merged(model) if "layers.1" not in each.name]
    )
    with pytest.raises(ConfigError, match="vllm computes other probabilities than LlamaForCausalLM"):
        decode(wide_causal_lm("llama"), engine="vllm")


@needs_vllm
def test_adapters_that_it_leaves_out_are_found_when_they_add_something(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide_causal_lm("llama")
    attach_lora(model, LoRAConfig(r=8), seed=2)
    part = vllm_engine.write_adapters
    monkeypatch.setattr(
        vllm_engine,
        "write_adapters",
        lambda adapters, directory: part(
            adapters._replace(factors={name: both for name, both in adapters.factors.items() if "mlp" not in name}),
            directory,
        ),
    )
    decode(model, engine="vllm")
    change(model, 5)
    change(model, 6)
    with pytest.raises(ConfigError, match="vllm computes other probabilities than LlamaForCausalLM"):
        decode(model, engine="vllm")


@needs_vllm
def test_vllm_for_another_kind_of_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="this vllm is for CPUs, and the makers sample on a GPU"):
        vllm_engine.check_vllm(on_gpu=True)


def test_a_gpu_that_is_not_the_first_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model is on cuda:1"):
        vllm_engine._check_place(torch.device("cuda", 1))


def test_rows_are_followed_through_vllms_batch() -> None:
    choices = vllm_engine._Choices()
    asked = [SimpleNamespace(extra_args={"row": row}) for row in range(4)]
    made: list[list[int]] = [[], [7], [7, 7], []]

    def follow(removed=(), added=(), moved=()) -> None:
        choices.follow(SimpleNamespace(removed=removed, added=added, moved=moved))

    one_way, swap = SimpleNamespace(name="UNIDIRECTIONAL"), SimpleNamespace(name="SWAP")
    follow(added=[(place, asked[place], None, made[place]) for place in range(3)])
    follow(removed=[0], moved=[(2, 0, one_way)])
    follow(added=[(2, asked[3], None, made[3])], moved=[(0, 1, swap)])
    with choices.by(lambda logits, rows, steps: Choice(rows * 10 + steps, logits[:, 0])):
        scores = choices.apply(torch.zeros(3, 40))
    assert choices.rows == [1, 2, 3]
    assert choices.steps.tolist() == [1, 2, 0]
    assert scores.argmax(-1).tolist() == [11, 22, 30]
    assert scores.isfinite().sum(-1).tolist() == [1, 1, 1]


def test_rows_at_different_steps_are_written_at_once() -> None:
    settings = GenerationSettings(max_new_tokens=3, stop_ids=(9,), pad_id=0)
    one, each = (Responses([3, 3], settings, None, torch.device("cpu")) for _ in range(2))
    tokens, places = [[5, 6, 7], [8, 9, 0]], torch.arange(2)
    for step in range(3):
        one.write(places, step, Choice(torch.tensor([row[step] for row in tokens]), torch.zeros(2)))
    each.write(places[:1], 0, Choice(torch.tensor([5]), torch.zeros(1)))
    for steps in ((1, 0), (2, 1)):
        chosen = torch.tensor([row[step] for row, step in zip(tokens, steps, strict=True)])
        each.write(places, torch.tensor(steps), Choice(chosen, torch.zeros(2)))
    prompts = torch.ones(2, 1, dtype=torch.long)
    for ours, theirs in zip(one.with_prompts(prompts, prompts), each.with_prompts(prompts, prompts), strict=True):
        assert torch.equal(ours, theirs)


def test_adapters_and_the_weights_below_them_make_the_model() -> None:
    model = tiny_causal_lm("llama")
    assert addable_adapters(model) is None
    before = dict(model.named_parameters())
    attach_lora(model, LoRAConfig(r=4, alpha=12), seed=1)
    change(model, 10)
    freeze_adapters(model)
    attach_lora(model, LoRAConfig(r=8, alpha=8), seed=2)
    change(model, 20)
    adapters, below = addable_adapters(model), dict(weights_below(model))
    assert adapters is not None
    assert below.keys() == before.keys()
    for name, weight, is_sum in each_merged(model):
        expected = below[name].float()
        if is_sum:
            a, b = adapters.factors[name.removesuffix(".weight")]
            expected = expected + adapters.alpha / adapters.rank * b @ a
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-5)
    attach_lora(other := tiny_causal_lm("qwen2"), LoRAConfig(r=4, bias="all"), seed=1)
    assert addable_adapters(other) is None

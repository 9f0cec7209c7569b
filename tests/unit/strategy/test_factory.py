"""Boosters by name, and what is refused in one sentence before anything is loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_core.errors import ConfigError
from rlhf_core.strategy import factory
from rlhf_core.strategy.factory import check_optimizer, check_strategy, make_booster
from rlhf_core.strategy.parts import Parts
from rlhf_core.strategy.plain import PlainBooster
from rlhf_core.strategy.ranks import Ranks, current_ranks, join_alone, leave

SHARDED = ("ddp", "zero2", "colossalai_zero2_cpu", "gemini")


@pytest.fixture
def alone() -> Iterator[Ranks]:
    """This process as a group of one."""
    yield join_alone()
    leave()


def said(caught: pytest.ExceptionInfo[ConfigError]) -> str:
    message = str(caught.value)
    assert "\n" not in message
    assert ". " not in message
    return message


IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "zero3": ({}, r"'zero3' is unknown; take one of plain, ddp, .*gemini_auto, 3d"),
    "zero2_cpu": (
        {"parts": Parts(tp=2, pp=2)},
        "strategy zero2_cpu does not cut one model into parts, but is asked for tp 2 x pp 2; take 3d, or set tp and",
    ),
    "plain": ({"precision": "fp16"}, "fp16 needs a GPU; take bf16"),
    "zero2": ({"precision": "fp16"}, "fp16 needs a GPU"),
    "gemini_auto": ({}, "there is no GPU; take gemini"),
    "gemini": ({"adapters": True}, "strategy gemini shards all weights and trains no adapters; take zero2"),
    "colossalai_gemini": ({"adapters": True, "cuda": True}, "trains no adapters"),
    "ddp": ({"num_trainers": 0}, "at least 1 trainer process, got 0"),
}


@pytest.mark.parametrize("strategy", IMPOSSIBLE)
def test_what_a_strategy_cannot_do_is_said_in_one_sentence(strategy: Any) -> None:
    asked, sentence = IMPOSSIBLE[strategy]
    with pytest.raises(ConfigError, match=sentence) as caught:
        check_strategy(strategy, **({"precision": "fp32", "cuda": False} | asked))
    said(caught)


def test_gemini_auto_makes_one_pass_per_step_and_wants_a_gpu() -> None:
    check_strategy("gemini_auto", precision="fp16", cuda=True)
    with pytest.raises(ConfigError, match="does not accumulate gradients") as caught:
        check_strategy("gemini_auto", precision="fp16", cuda=True, accumulates=True)
    said(caught)


@pytest.mark.parametrize("strategy", SHARDED)
def test_what_a_cpu_can_do_passes(strategy: Any) -> None:
    check_strategy(strategy, precision="bf16", cuda=False, num_trainers=2, accumulates=True)
    check_strategy("zero2", precision="fp32", cuda=False, adapters=True)


def test_without_colossalai_its_strategies_name_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(factory.importlib.util, "find_spec", lambda name: None if name == "colossalai" else find(name))
    check_strategy("plain", precision="fp32", cuda=False)
    with pytest.raises(ConfigError, match=r"strategy zero2 needs ColossalAI, .*`make setup`.*--no-deps") as caught:
        check_strategy("zero2", precision="fp32", cuda=False)
    assert "colossalai==" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_plain_needs_no_group_of_processes() -> None:
    booster = make_booster("plain", precision="bf16", max_norm=0.5, device="cpu")
    assert isinstance(booster, PlainBooster)
    assert (booster.autocast_dtype, booster.max_norm, booster.ranks.world_size) == (torch.bfloat16, 0.5, 1)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("strategy", "name"),
    [("ddp", "DDPBooster"), ("zero2", "ZeroBooster"), ("colossalai_zero2", "ZeroBooster"), ("gemini", "GeminiBooster")],
)
def test_a_process_on_its_own_enters_a_group_of_one(strategy: Any, name: str) -> None:
    try:
        booster = make_booster(strategy, precision="bf16", max_norm=0.5, device="cpu")
        assert torch.distributed.get_world_size() == 1
    finally:
        leave()
    assert type(booster).__name__ == name
    assert (booster.autocast_dtype, booster.max_norm) == (torch.bfloat16, 0.5)


@pytest.mark.parametrize(("strategy", "offloads"), [("zero2_cpu", True), ("colossalai_zero2", False)])
def test_offloading_is_the_names(strategy: Any, offloads: bool, alone: Ranks) -> None:
    booster: Any = make_booster(strategy, ranks=alone, device="cpu")
    assert booster.cpu_offload is offloads


def test_ranks_that_have_not_met_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"asked for 4 ranks, but this process has joined no group") as caught:
        make_booster("zero2", ranks=Ranks(0, 4), device="cpu")
    said(caught)
    assert current_ranks().world_size == 1


def test_processes_of_torchrun_that_joined_no_group_do_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="would train alone in each of the 2 processes") as caught:
        make_booster("zero2")
    said(caught)


def test_a_world_of_another_size_is_refused(alone: Ranks) -> None:
    assert alone.world_size == 1
    with pytest.raises(ConfigError, match="over the whole group \\(1 process\\), but is asked for 4 ranks") as caught:
        make_booster("zero2", ranks=Ranks(0, 4), device="cpu")
    said(caught)


def test_ranks_that_share_a_gpu_are_told_so(alone: Ranks) -> None:
    with pytest.raises(ConfigError, match=r"over NCCL, which needs one for each of 1 rank, but they share") as caught:
        make_booster("zero2", ranks=alone, device="cuda")
    said(caught)


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_model_on_another_device_than_the_current_gpu_is_refused(
    device: str, alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ConfigError, match=f"current GPU, cuda:0, but the model is to be on {device}") as caught:
        make_booster("ddp", ranks=alone, device=device)
    said(caught)


def test_plain_takes_any_optimizer_and_the_others_what_they_can_shard() -> None:
    model = nn.Linear(2, 2)
    adagrad = torch.optim.Adagrad(model.parameters())
    check_optimizer("plain", adagrad, model)
    check_optimizer("ddp", adagrad, model)
    check_optimizer("zero2_cpu", torch.optim.Adam(model.parameters()), model)
    with pytest.raises(ConfigError, match=r"strategy zero2 .*takes Adam, AdamW or HybridAdam, not Adagrad") as caught:
        check_optimizer("zero2", adagrad, model)
    said(caught)
    with pytest.raises(ConfigError, match="strategy gemini takes ColossalAI's HybridAdam, not AdamW") as caught:
        check_optimizer("gemini", torch.optim.AdamW(model.parameters()), model)
    said(caught)


def test_an_optimizer_of_another_model_or_of_frozen_weights_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="none of the Linear's beside it") as caught:
        check_optimizer("plain", torch.optim.AdamW(nn.Linear(2, 2).parameters()), model)
    said(caught)
    optimizer = torch.optim.AdamW(model.parameters())
    model.bias.requires_grad_(False)
    with pytest.raises(ConfigError, match="frozen weights in the optimizer: 1 of 2") as caught:
        check_optimizer("plain", optimizer, model)
    said(caught)

"""Which plugin a command line gets where there are GPUs and where there are none, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_core.coati.script.flags import build_parser
from rlhf_core.coati.script.models import Models
from rlhf_core.coati.script.run import Plugin, _trainees, choose_plugin
from rlhf_core.errors import ConfigError
from rlhf_core.models.critic import Critic
from rlhf_core.strategy.ranks import ALONE, leave
from tests.tiny_llama import tiny_tokenizer
from tests.unit.coati.script.brief_llama import brief_llama


def chosen(*flags: str, cuda: bool) -> tuple[Plugin, list[str]]:
    told: list[str] = []
    plugin = choose_plugin(build_parser().parse_args(flags), cuda=cuda, num_ranks=2, tell=told.append)
    return plugin, told


def test_on_gpus_the_default_is_the_originals_and_nothing_is_said() -> None:
    assert chosen(cuda=True) == (Plugin("gemini", "fp16"), [])


def test_adapters_on_gpus_get_a_plugin_that_trains_them() -> None:
    plugin, told = chosen("--lora_config", "lora.json", "--mixed_precision", "bf16", cuda=True)
    assert plugin == Plugin("zero2", "bf16")
    assert told == ["--plugin zero2: gemini, the default, trains no adapters"]


@pytest.mark.parametrize("more", [(), ("--lora_config", "lora.json")])
def test_on_a_cpu_nothing_is_sharded_unless_it_is_asked_for(more: tuple[str, ...]) -> None:
    plugin, told = chosen(*more, cuda=False)
    assert plugin == Plugin("plain", "bf16")
    assert told == [
        "--mixed_precision fp16 runs as bf16 on a CPU",
        "--plugin plain: gemini, the default, is for GPUs; here every rank holds whole models",
    ]


@pytest.mark.parametrize("name", ["gemini", "zero2", "zero2_cpu", "ddp", "plain"])
def test_what_is_asked_for_is_what_runs(name: str) -> None:
    plugin, told = chosen("--plugin", name, "--mixed_precision", "bf16", cuda=False)
    assert (plugin, told) == ((name, "bf16"), [])


def test_what_cannot_be_had_here_is_one_sentence_with_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"^--plugin gemini_auto cannot be had: .*there is no GPU; take gemini$"):
        chosen("--plugin", "gemini_auto", "--accumulation_steps", "1", cuda=False)


@pytest.mark.parametrize(
    ("strategy", "kind"), [("plain", "PlainBooster"), ("zero2_cpu", "ZeroBooster"), ("gemini", "GeminiBooster")]
)
def test_actor_and_critic_have_a_booster_of_the_plugin_each(strategy: Any, kind: str) -> None:
    args = build_parser().parse_args(["--grad_clip", "0.5", "--lr", "0.25", "--critic_lr", "0.5"])
    models = Models(brief_llama(), Critic.from_causal_lm(brief_llama()), None, None, tiny_tokenizer(), "policy")
    try:
        trainees = _trainees(args, models, Plugin(strategy, "bf16"), ALONE)
    finally:
        leave()
    assert {type(trained.booster).__name__ for trained in trainees} == {kind}
    assert trainees.actor.booster is not trainees.critic.booster
    assert {(trained.booster.max_norm, trained.booster.autocast_dtype) for trained in trainees} == {
        (0.5, torch.bfloat16)
    }
    peaks = [group["initial_lr"] for trained in trainees for group in trained.optimizer.param_groups]
    assert (set(peaks[: len(peaks) // 2]), set(peaks[len(peaks) // 2 :])) == ({0.25}, {0.5})

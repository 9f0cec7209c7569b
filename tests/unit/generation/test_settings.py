"""What an engine is asked for is checked before anything is generated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhf_core.errors import ConfigError, DataError
from rlhf_core.generation import make_engine
from tests.tiny_llama import tiny_llama
from tests.unit.generation.test_engine import SETTINGS, decode
from tests.unit.models.architectures import tiny_causal_lm


def test_more_tokens_than_the_model_has_positions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"up to 132 tokens.*128 positions"):
        decode(tiny_causal_lm("gpt2"), max_new_tokens=125)


def test_a_prompt_without_room_for_a_response_is_refused() -> None:
    with pytest.raises(DataError, match="has 7 tokens, which leaves no room for a response within max_length 7"):
        decode(tiny_llama(), max_length=7)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        decode(tiny_llama(), [[5], []])


def test_fewer_uniform_numbers_than_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="5 rows of 12 tokens"):
        decode(tiny_llama(), uniforms=torch.zeros(5, 11))


def test_an_unknown_engine_is_refused() -> None:
    known = "native, native_graphs, hf, vllm"
    with pytest.raises(ConfigError, match=f"no generation engine 'sglang'; choose one of {known}"):
        make_engine("sglang", tiny_llama())


@pytest.mark.parametrize(
    "wrong", [{"temperature": 0.0}, {"top_k": -1}, {"top_p": 0.0}, {"max_new_tokens": 0}, {"stop_strings": ("",)}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        replace(SETTINGS, **wrong)

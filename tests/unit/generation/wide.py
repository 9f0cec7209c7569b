"""Tiny models with heads of 32 numbers, the narrowest that vLLM's kernels for CPUs take, and whether it is here."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from transformers import PreTrainedModel

from rlhf_core.generation.vllm_engine import PACKAGE
from tests.tiny_llama import tiny_llama
from tests.unit.models.architectures import tiny_causal_lm

IN_VLLM = ("llama", "gpt2", "opt", "qwen2", "qwen3", "mistral")
"""vLLM's BLOOM takes no head of its own."""
needs_vllm = pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason="needs vLLM: make vllm")
_WIDE = 128
_MORE: dict[str, dict[str, Any]] = {
    "opt": {"word_embed_proj_dim": _WIDE},
    "qwen3": {"head_dim": 32},
    "mistral": {"head_dim": 32},
}


def wide_causal_lm(architecture: str) -> PreTrainedModel:
    """Return a float32 model in evaluation mode, as `tiny_causal_lm` does."""
    if architecture == "llama":
        return tiny_llama(initializer_range=0.2, hidden_size=_WIDE)
    return tiny_causal_lm(architecture, hidden_size=_WIDE, **_MORE.get(architecture, {}))

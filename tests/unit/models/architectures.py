"""Tiny causal language models with random weights, of architectures that differ in all that code takes for granted."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.tiny_llama import tiny_llama

ARCHITECTURES = ("llama", "gpt2", "opt", "bloom", "qwen2", "qwen3", "mistral")
WINDOW = 6  # Mistral's: shorter than the sequences of the tests
DROPOUT = 0.3

_COMMON: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED: dict[str, Any] = _COMMON | {
    "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 128, "attention_dropout": DROPOUT,
}  # fmt: skip


def _config(architecture: str) -> PreTrainedConfig:
    match architecture:
        case "gpt2":  # learnt positions, transposed weights
            return GPT2Config(**_COMMON, n_positions=128, resid_pdrop=DROPOUT, embd_pdrop=DROPOUT, attn_pdrop=DROPOUT)
        case "opt":  # learnt positions that begin at 2
            return OPTConfig(
                **_COMMON, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=128, dropout=DROPOUT,
                attention_dropout=DROPOUT, layerdrop=DROPOUT, init_std=0.2, pad_token_id=0,
            )  # fmt: skip
        case "bloom":  # no positions but distances, no sdpa
            return BloomConfig(**_COMMON, hidden_dropout=DROPOUT, attention_dropout=DROPOUT)
        case "qwen2":  # biases in attention
            return Qwen2Config(**_GROUPED)
        case "qwen3":  # normed queries and keys, heads of a width of their own
            return Qwen3Config(**_GROUPED, head_dim=16)
        case "mistral":  # each token sees a window
            return MistralConfig(**_GROUPED, sliding_window=WINDOW)
    raise ValueError(architecture)


def tiny_causal_lm(architecture: str, *, seed: int = 0, **sizes: int) -> PreTrainedModel:
    """Return a float32 model in evaluation mode; its weights depend on architecture, seed and sizes alone."""
    if architecture == "llama":  # rotary positions, grouped heads, no dropout
        return tiny_llama(seed=seed, initializer_range=0.2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = _config(architecture)
        config.update(sizes)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():  # biases begin at zero: one that is left out would not be seen
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.2)
    return model.eval()

"""Two architectures that differ in all that the code could take for granted."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from tests.tiny_llama import tiny_llama

ARCHITECTURES = ("llama", "gpt2")


def tiny_causal_lm(architecture: str, *, seed: int = 0) -> PreTrainedModel:
    """Llama: rotary positions, grouped heads. GPT-2: learnt positions, transposed weights, dropout."""
    if architecture == "llama":
        return tiny_llama(seed=seed, initializer_range=0.2)
    config = GPT2Config(
        vocab_size=259, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config).eval()

"""A tiny Llama whose responses are short, so that a run with the original's 256 tokens takes a second."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from rlhf_core.models.reward_model import RewardModel
from rlhf_core.models.saving import save_model
from tests.tiny_llama import tiny_llama, tiny_tokenizer

# All tokens lean one way, the end token five times as far: its logit is largest whatever came before.
_LEAN, _LEAN_OF_END = 0.1, 0.5


def brief_llama(*, seed: int = 0) -> LlamaForCausalLM:
    """Return a Llama of one layer that ends a response after some ten tokens."""
    config = tiny_llama().config
    config.update({"num_hidden_layers": 2, "hidden_size": 32, "head_dim": 8, "intermediate_size": 64})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
        weights = model.get_input_embeddings().weight
        weights[:, 0] = _LEAN
        weights[tiny_tokenizer().eos_token_id, 0] = _LEAN_OF_END
    return model


def write_models(directory: Path) -> Path:
    """Write model/ and rm_checkpoint/ with their tokenizers; return the directory."""
    model = brief_llama()
    save_model(model, tiny_tokenizer(), directory / "model")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        RewardModel.from_causal_lm(model).save_pretrained(directory / "rm_checkpoint")
    tiny_tokenizer().save_pretrained(directory / "rm_checkpoint")
    return directory

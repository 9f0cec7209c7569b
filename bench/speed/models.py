"""The model that rows are measured with: SmolLM2-135M-Instruct, or one of that form with random weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from bench.speed.measure import DEVICE, Run
from infra.settings import settings
from rlhf_core.config import LoRAConfig
from rlhf_core.models.loading import has_fast_bfloat16, load_causal_lm, locate_model
from rlhf_core.models.lora import attach_lora
from rlhf_core.models.saving import quiet

ARITHMETIC = "bfloat16" if DEVICE.type != "cpu" or has_fast_bfloat16() else "float32"
"""Ours and the peers': what our runs take on this machine; `ppo_step_bfloat16` and `ppo_step_float32` name theirs."""
DTYPE: torch.dtype = getattr(torch, ARITHMETIC)
OUR_ADAPTERS = LoRAConfig(r=16)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def directory(run: Run) -> Path:
    """Return the directory of model and tokenizer."""
    if run.tiny or run.large:
        return Path(_random("tiny" if run.tiny else "large").name)
    return locate_model("smollm2-135m-instruct", models_dir=settings().models_dir)


def load(run: Run, dtype: str) -> PreTrainedModel:
    """Return the causal language model on the device."""
    return load_causal_lm(directory(run), dtype, device=DEVICE)


def with_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with our adapters on it."""
    attach_lora(model, OUR_ADAPTERS, seed=0)
    return model


def with_peft(model: PreTrainedModel) -> Any:
    """Return the model with peft's own layers on it."""
    return get_peft_model(model, peft_adapters())


def peft_adapters() -> LoraConfig:
    """Return our adapters as peft is told of them, a new one each time: peft writes a model's layers into it."""
    return LoraConfig(r=OUR_ADAPTERS.r, lora_alpha=OUR_ADAPTERS.alpha, target_modules="all-linear")


def random_ids(model: PreTrainedModel, rows: int, tokens: int) -> list[list[int]]:
    """Return rows of ordinary tokens, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size
    return torch.randint(len(_SPECIAL), vocabulary - 1, (rows, tokens), generator=generator).tolist()


_FORMS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 1024,
    },
    "large": {  # of Llama 3.2 1B
        "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    },
}  # fmt: skip


@cache
def _random(form: Literal["tiny", "large"]) -> TemporaryDirectory[str]:
    """Write a Llama with random weights, and a tokenizer whose tokens are bytes."""
    place = TemporaryDirectory(prefix="rlhf-bench-")
    words = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=_SPECIAL[1], eos_token=_SPECIAL[2], pad_token=_SPECIAL[0],
        chat_template=_CHAT,
    ).save_pretrained(place.name)  # fmt: skip
    sizes = {"vocab_size": len(words), **_FORMS[form]}
    config = LlamaConfig(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=True)
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.float32 if form == "tiny" else torch.bfloat16).save_pretrained(place.name)
    return place

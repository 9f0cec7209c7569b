"""A tiny random-weight Llama with a byte-level ChatML tokenizer: a real model directory in a second."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 256 bytes after three special tokens: one token is one byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_llama(*, seed: int = 0, initializer_range: float = 0.02, **sizes: int) -> LlamaForCausalLM:
    """Return a float32 Llama of 2 layers and hidden size 64 with random weights that depend on `seed` alone.

    Args:
        seed: seed of the weights; the global random state is left as it was.
        initializer_range: standard deviation of the weights; a larger one gives a less uniform model.
        **sizes: of its configuration, where it is to be larger.
    """
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, **sizes},
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=initializer_range,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def write_tiny_llama(directory: Path, *, seed: int = 0, initializer_range: float = 0.02, **sizes: int) -> Path:
    """Write model and tokenizer to `directory`, as `AutoModelForCausalLM` and `AutoTokenizer` load them."""
    tiny_llama(seed=seed, initializer_range=initializer_range, **sizes).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory

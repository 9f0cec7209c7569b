"""The tiny model that other tests stand on."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_llama import tiny_llama, write_tiny_llama


def test_the_written_directory_loads_with_auto_classes(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert torch.equal(model.lm_head.weight, tiny_llama().lm_head.weight)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_the_tokenizer_is_lossless_and_knows_its_special_tokens(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_tiny_llama(tmp_path / "model"))
    ids = tokenizer("<|im_start|>user\nSort ä 12  3<|im_end|>", add_special_tokens=False)["input_ids"]
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids) == "<|im_start|>user\nSort ä 12  3<|im_end|>"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_weights_depend_on_the_seed_alone() -> None:
    state = torch.get_rng_state()
    first, again, other = tiny_llama(seed=1), tiny_llama(seed=1), tiny_llama(seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)

"""The problem: say six digits backwards. A tiny Llama from scratch, a short SFT start, and a verifier."""

from __future__ import annotations

import random
from pathlib import Path

import settings
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

DIGITS, PAD, EOS, EQUALS = 6, 0, 1, 2
VOCABULARY = {"<pad>": PAD, "<eos>": EOS, "=": EQUALS} | {str(digit): 3 + digit for digit in range(10)}
SFT_STEPS, SFT_BATCH, SFT_LR = 200, 64, 1e-3


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per character."""
    core = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.add_special_tokens(["<pad>", "<eos>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def prompts(seed: int, count: int) -> list[str]:
    """Return prompts like "123456=", the same for the same seed."""
    draw = random.Random(seed)
    return ["".join(draw.choices("0123456789", k=DIGITS)) + "=" for _ in range(count)]


def answer(prompt: str) -> str:
    """Return the digits backwards."""
    return prompt[:DIGITS][::-1]


def score(prompt_ids: list[int], response_ids: list[int]) -> float:
    """Return 1 if the response is the prompt's digits backwards and the stop token, else 0."""
    return float(response_ids == [*prompt_ids[:DIGITS][::-1], EOS])


def start(seed: int, directory: Path) -> None:
    """Write a model that was trained from scratch until it is right now and then, and its tokenizer."""
    torch.manual_seed(seed)
    words = tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=32,
            pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=SFT_LR)
    for step in range(SFT_STEPS):
        texts = [text + answer(text) for text in prompts(10_000 * (seed + 1) + step, SFT_BATCH)]
        ids = torch.tensor([[*words(text, add_special_tokens=False).input_ids, EOS] for text in texts])
        logits = model(ids).logits[:, DIGITS:-1]
        nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, DIGITS + 1 :].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    words.save_pretrained(directory)


@torch.no_grad()
def sampled_score(model: nn.Module, seed: int, count: int = 512) -> float:
    """Return the mean score of sampled answers at temperature 1 on prompts that no training saw, by plain torch."""
    words = tokenizer()
    ids: Tensor = torch.tensor([words(text, add_special_tokens=False).input_ids for text in prompts(seed, count)])
    draw = torch.Generator().manual_seed(seed)
    model.eval()
    for _ in range(DIGITS + 1):
        probabilities = model(ids).logits[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=draw)], 1)
    rows = ids.tolist()
    return sum(score(row[: DIGITS + 1], _until_eos(row[DIGITS + 1 :])) for row in rows) / count


def _until_eos(response: list[int]) -> list[int]:
    return response[: response.index(EOS) + 1] if EOS in response else response


def held_out(start: Path) -> float:
    """Return the held-out score of a stored model."""
    return sampled_score(LlamaForCausalLM.from_pretrained(start), settings.HELD_OUT_SEED)

"""Cross-entropy of the packaged passages, against what transformers computes of one at a time."""

from __future__ import annotations

import re

import pytest
import torch

from rlhf_core.errors import ConfigError
from rlhf_core.forgetting.measures import TEXT
from rlhf_core.forgetting.text import PASSAGES, packaged_passages, text_cross_entropy, token_logprobs
from tests.tiny_llama import tiny_llama, tiny_tokenizer


def test_the_cross_entropy_of_each_passage_is_transformers_own_loss_of_it_alone() -> None:
    model, tokenizer, passages = tiny_llama(initializer_range=0.3), tiny_tokenizer(), packaged_passages(9)
    model.train()
    found = text_cross_entropy(model, tokenizer, passages, most=1024, dtype=torch.float32)
    assert found.suite == TEXT
    assert model.training
    model.eval()
    for name, text in passages.items():
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            assert found.values[name] == pytest.approx(model(ids, labels=ids).loss.item(), abs=1e-4)


def test_what_is_too_long_or_has_no_position_is_cut_off() -> None:
    model = tiny_llama()
    model.config.max_position_embeddings = 16
    ids = tiny_tokenizer()("abcdefghijklmnopqrstuvw")["input_ids"]
    for most, read in ((99, 16), (7, 7)):
        found = text_cross_entropy(
            model, tiny_tokenizer(), {"a": "abcdefghijklmnopqrstuvw"}, most=most, dtype=torch.float32
        )
        (logprobs,) = token_logprobs(model, [ids[:read]], dtype=torch.float32)
        assert len(logprobs) == read - 1
        assert found.values["a"] == pytest.approx(-logprobs.mean().item())


def test_there_are_48_passages_of_many_kinds_and_none_is_empty_or_twice() -> None:
    passages = packaged_passages(48)
    assert len(passages) == 48
    assert len(set(passages.values())) == 48
    assert 20_000 < len(PASSAGES.read_bytes()) < 40_000
    assert {"german", "french", "spanish", "portuguese", "chinese", "sql", "sums", "python function"} <= set(
        packaged_passages(24)
    )
    with pytest.raises(ConfigError, match="passages is 49, but 48 are packaged; lower it to 48"):
        packaged_passages(49)


def test_what_the_passages_calculate_is_right() -> None:
    sums = packaged_passages(24)["sums"].splitlines()
    assert len(sums) == 15
    for line in sums:
        assert re.fullmatch(r"[0-9 +*/=-]+", line)
        left, right = line.split("=")
        value = int(re.match(r" *\d+", left)[0])  # type: ignore[index]
        for sign, number in re.findall(r"([-+*/]) (\d+)", left):
            value = {"+": value + int(number), "-": value - int(number), "*": value * int(number),
                     "/": value / int(number)}[sign]  # fmt: skip
        assert value == int(right)


def test_disturbed_weights_forget_text() -> None:
    torch.manual_seed(0)
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    passages = packaged_passages(4)
    rows = [torch.tensor(tokenizer(text)["input_ids"]) for text in passages.values()]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(15):
        for row in rows:
            optimizer.zero_grad()
            model(row[None, :200], labels=row[None, :200]).loss.backward()
            optimizer.step()
    before = text_cross_entropy(model, tokenizer, passages, most=200, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    after = text_cross_entropy(model, tokenizer, passages, most=200, dtype=torch.float32)
    assert all(after.values[name] > before.values[name] for name in passages)

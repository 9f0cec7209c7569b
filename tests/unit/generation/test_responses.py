"""Stop strings are found where a reader of the whole text would find them, at the token that completes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_core.errors import ConfigError
from rlhf_core.generation import GenerationSettings, make_engine, sample_uniforms
from rlhf_core.generation.responses import StopStrings
from tests.tiny_llama import tiny_llama, tiny_tokenizer
from tests.unit.generation.test_engine import ENGINES
from tests.unit.generation.wide import wide_causal_lm

torch.set_num_threads(1)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose decoder drops the space of the first word, as those of Llama's kind do."""
    words = ["<unk>", "▁the", "▁end", "▁of", "s", "▁it", "."]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def first_stop(ids: list[int], strings: tuple[str, ...], tokenizer) -> int | None:
    """Return how many tokens are read until a stop string is seen."""
    watch = StopStrings(strings, tokenizer, 1)
    return next((count for count, token in enumerate(ids, 1) if watch.completed_by(0, token)), None)


def definition(ids: list[int], strings: tuple[str, ...], tokenizer) -> int | None:
    """Return the same by decoding the whole response anew at each token."""
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if any(string in text for string in strings):
            return count
    return None


@pytest.mark.parametrize(
    ("text", "strings"),
    [
        ("a line\nanother", ("\n",)),
        ("Human: so\n\nHuman: and", ("\n\nHuman:",)),
        ("no such text", ("stop",)),
        ("überall: 日本語。end", ("日本語。",)),
        ("aab aaab", ("aab", "aaab")),
        ("x🙂y", ("🙂",)),
    ],
)
def test_a_string_is_found_at_the_byte_that_completes_it(text: str, strings: tuple[str, ...]) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text, add_special_tokens=False).input_ids
    cut = min((text.index(string) + len(string) for string in strings if string in text), default=None)
    expected = None if cut is None else len(text[:cut].encode())  # a token is a byte
    assert first_stop(ids, strings, tokenizer) == expected == definition(ids, strings, tokenizer)


@pytest.mark.parametrize("strings", [(" end",), ("the end",), ("ends of",), ("s.",), ("end it",), (" the",)])
def test_spaces_between_words_are_read_as_in_the_whole_text(strings: tuple[str, ...]) -> None:
    tokenizer = word_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(["▁the", "▁end", "s", "▁of", "▁it", "s", "."])
    assert first_stop(ids, strings, tokenizer) == definition(ids, strings, tokenizer)


def test_random_bytes_are_read_as_in_the_whole_text() -> None:
    tokenizer = tiny_tokenizer()
    generator = torch.Generator().manual_seed(0)
    found = 0
    for _ in range(50):
        ids = torch.randint(3, 259, (40,), generator=generator).tolist()
        ids[20:20] = tokenizer("é!", add_special_tokens=False).input_ids
        stop = first_stop(ids, ("é!", "%"), tokenizer)
        assert stop == definition(ids, ("é!", "%"), tokenizer)
        found += stop is not None
    assert found > 40


@pytest.mark.parametrize("engine", ENGINES)
def test_a_response_ends_with_the_token_that_completes_a_stop_string(engine: str) -> None:
    model, tokenizer = wide_causal_lm("llama"), tiny_tokenizer()
    prompts = [[5, 6, 7], [10, 11], [12]]
    uniforms = sample_uniforms(seed=0, episode=0, keys=list("abc"), samples=[0] * 3, max_new_tokens=12)
    settings = GenerationSettings(max_new_tokens=12, stop_ids=(), pad_id=0)
    maker = make_engine(engine, model, tokenizer=tokenizer)
    free = maker.generate(prompts, settings, uniforms=uniforms).sequences[:, 3:].tolist()
    pair = tokenizer.decode(next(row[5:7] for row in free if max(row[5:7]) < 90 and min(row[5:7]) > 3))
    stopped = maker.generate(prompts, replace(settings, stop_strings=(pair,)), uniforms=uniforms)
    expected = [definition(row, (pair,), tokenizer) for row in free]
    assert stopped.action_mask.sum(1).tolist() == [count or 12 for count in expected]
    assert stopped.ended.tolist() == [count is not None for count in expected]
    assert stopped.ended.any()
    assert not stopped.ended.all()


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    settings = GenerationSettings(max_new_tokens=2, stop_ids=(), pad_id=0, stop_strings=("x",))
    with pytest.raises(ConfigError, match="no tokenizer to read it with"):
        make_engine("native", tiny_llama()).generate([[5]], settings, uniforms=None)

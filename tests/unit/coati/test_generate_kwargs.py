"""coati's names for how responses are drawn."""

from __future__ import annotations

import pytest

from rlhf_core.coati.generate_kwargs import generation_settings_from_kwargs, is_greedy
from rlhf_core.errors import ConfigError
from tests.tiny_llama import tiny_tokenizer

END, TEXT_END = tiny_tokenizer().convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])


def test_defaults_are_coatis_lengths_and_the_plain_distribution() -> None:
    found = generation_settings_from_kwargs({}, tiny_tokenizer())
    assert (found.max_new_tokens, found.max_length) == (256, 2048)
    assert (found.temperature, found.top_k, found.top_p) == (1.0, 0, 1.0)
    assert (found.stop_ids, found.stop_strings, found.pad_id) == ((END,), (), TEXT_END)


def test_names_of_coati_and_transformers_mean_what_they_mean_there() -> None:
    found = generation_settings_from_kwargs(
        {"max_new_tokens": 7, "max_length": None, "temperature": 0.7, "top_k": 50, "top_p": 0.9, "use_cache": True,
         "early_stopping": True, "num_beams": 1, "stop_strings": "stop", "pad_token_id": 5},
        tiny_tokenizer(),
    )  # fmt: skip
    assert (found.max_new_tokens, found.max_length, found.temperature) == (7, 2048, 0.7)
    assert (found.top_k, found.top_p, found.stop_strings, found.pad_id) == (50, 0.9, ("stop",), 5)


def test_stop_tokens_are_alternatives_and_several_in_a_list_are_a_text() -> None:
    text = tiny_tokenizer()("</a>").input_ids
    found = generation_settings_from_kwargs({"stop_token_ids": [TEXT_END, [7], text]}, tiny_tokenizer())
    assert (found.stop_ids, found.stop_strings) == ((TEXT_END, 7, END), ("</a>",))


def test_greedy_is_asked_for_by_do_sample() -> None:
    assert is_greedy({"do_sample": False})
    assert not is_greedy({"do_sample": True})
    assert not is_greedy({})


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"max_new_token": 5}, r"takes no argument 'max_new_token'; did you mean max_new_tokens\?"),
        ({"zebra": 1}, "known are max_new_tokens"),
        ({"num_beams": 4}, "generation with num_beams=4 is not there; leave it at 1"),
        ({"temperature": 0.0}, "temperature must be a number above 0, not 0.0"),
        ({"temperature": "0.7"}, "temperature must be a number above 0, not '0.7'"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number above 0, not 2.5"),
        ({"max_length": 0}, "max_length must be a whole number above 0, not 0"),
        ({"top_k": 1.5}, "top_k must be a whole number, 0 for all tokens, not 1.5"),
        ({"top_p": 0}, "top_p must be a number above 0 and at most 1, not 0"),
        ({"do_sample": "no"}, "do_sample must be True or False"),
        ({"pad_token_id": 999}, "generation names token 999, but the tokenizer has 259 tokens"),
        ({"stop_strings": 5}, "stop_strings must be a text, or a list of texts, not 5"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids must be a token's number"),
        ({"repetition_penalty": [1]}, r"generation with repetition_penalty=\[1\] is not there"),
        ({"stop_token_ids": [5000]}, "names token 5000"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(kwargs: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        generation_settings_from_kwargs(kwargs, tiny_tokenizer())

"""The keyword arguments that coati hands through to generation, as settings of ours."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_core.config import TemplateConfig
from rlhf_core.data.template import PromptTemplate
from rlhf_core.errors import ConfigError
from rlhf_core.generation import GenerationSettings

DEFAULTS: Mapping[str, Any] = {
    "max_new_tokens": 256,
    "max_length": 2048,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "do_sample": True,
    "stop_token_ids": None,
    "stop_strings": (),
    "eos_token_id": None,
    "pad_token_id": None,
}
WITHOUT_EFFECT = frozenset({"use_cache", "early_stopping", "synced_gpus", "length_penalty", "min_length"})
"""Accepted since scripts pass them: our engines always cache, and none of them searches beams."""
_NEUTRAL: Mapping[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
}


def generation_settings_from_kwargs(kwargs: Mapping[str, Any], tokenizer: Any) -> GenerationSettings:
    """Return the settings that coati's `generate_kwargs` ask for.

    `stop_token_ids` are alternatives: a number is a token that ends a response, a list of several is a text
    that does; the tokenizer's end-of-sequence token always ends one. `max_length` counts prompt and response.

    Args:
        kwargs: as in coati, and transformers' names for the same; what is None or left out has its default.
        tokenizer: of the model.

    Raises:
        ConfigError: if a name is unknown or a value cannot be.
    """
    _check(kwargs)
    given = {**DEFAULTS, **{name: value for name, value in kwargs.items() if value is not None}}
    stops, texts = _stops(given["stop_token_ids"], tokenizer)
    stops += _stops(given["eos_token_id"], tokenizer)[0]
    template = PromptTemplate(tokenizer, TemplateConfig(stop_ids=tuple(dict.fromkeys(stops))))
    strings = given["stop_strings"]
    return GenerationSettings(
        max_new_tokens=given["max_new_tokens"],
        stop_ids=template.stop_ids,
        pad_id=template.pad_id if given["pad_token_id"] is None else given["pad_token_id"],
        temperature=given["temperature"],
        top_k=given["top_k"],
        top_p=given["top_p"],
        max_length=given["max_length"],
        stop_strings=tuple(dict.fromkeys([*([strings] if isinstance(strings, str) else strings), *texts])),
    )


def is_greedy(kwargs: Mapping[str, Any]) -> bool:
    """Return whether `do_sample=False` asks for the likeliest token each time."""
    return kwargs.get("do_sample") is False


def _check(kwargs: Mapping[str, Any]) -> None:
    for name, value in kwargs.items():
        if name in _NEUTRAL and value not in {None, _NEUTRAL[name]}:
            raise ConfigError(f"generation with {name}={value!r} is not there; leave it at {_NEUTRAL[name]}")
        if name not in DEFAULTS and name not in WITHOUT_EFFECT and name not in _NEUTRAL:
            near = difflib.get_close_matches(name, DEFAULTS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(DEFAULTS)}"
            raise ConfigError(f"generation takes no argument {name!r}; {hint}")


def _stops(given: int | Sequence[int | Sequence[int]] | None, tokenizer: Any) -> tuple[list[int], list[str]]:
    """Return the tokens that end a response, and the texts that do."""
    tokens: list[int] = []
    texts: list[str] = []
    for stop in [given] if isinstance(given, int) else given or ():
        ids = [stop] if isinstance(stop, int) else list(stop)
        if len(ids) == 1:
            tokens += ids
        elif ids:
            texts.append(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return tokens, texts

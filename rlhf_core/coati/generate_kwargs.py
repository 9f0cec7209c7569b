"""The keyword arguments that coati hands through to generation, as settings of ours."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
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


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_stops(value: Any) -> bool:
    return _is_whole(value) or (
        isinstance(value, list | tuple)
        and all(_is_whole(stop) or (isinstance(stop, list | tuple) and all(map(_is_whole, stop))) for stop in value)
    )


def _are_texts(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list | tuple) and all(isinstance(text, str) and text for text in value)
    )


_COUNT = (lambda value: _is_whole(value) and value >= 1, "a whole number above 0")
_STOPS = (_are_stops, "a token's number, or a list of such and of lists of them")
_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": _COUNT,
    "max_length": _COUNT,
    "temperature": (lambda value: _is_number(value) and 0 < value < math.inf, "a number above 0"),
    "top_k": (lambda value: _is_whole(value) and value >= 0, "a whole number, 0 for all tokens"),
    "top_p": (lambda value: _is_number(value) and 0 < value <= 1, "a number above 0 and at most 1"),
    "do_sample": (lambda value: isinstance(value, bool), "True or False"),
    "stop_token_ids": _STOPS,
    "eos_token_id": _STOPS,
    "stop_strings": (_are_texts, "a text, or a list of texts"),
    "pad_token_id": (_is_whole, "a token's number"),
}
"""What each may be, and how that is said."""


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
    _check_names(kwargs)
    _check_values(kwargs, tokenizer)
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


def _check_names(kwargs: Mapping[str, Any]) -> None:
    for name, value in kwargs.items():
        if name in _NEUTRAL and value is not None and value != _NEUTRAL[name]:
            raise ConfigError(f"generation with {name}={value!r} is not there; leave it at {_NEUTRAL[name]}")
        if name not in DEFAULTS and name not in WITHOUT_EFFECT and name not in _NEUTRAL:
            near = difflib.get_close_matches(name, DEFAULTS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(DEFAULTS)}"
            raise ConfigError(f"generation takes no argument {name!r}; {hint}")


def _check_values(kwargs: Mapping[str, Any], tokenizer: Any) -> None:
    known = len(tokenizer)
    for name, (is_right, wanted) in _VALUES.items():
        value = kwargs.get(name)
        if value is not None and not is_right(value):
            raise ConfigError(f"generation's {name} must be {wanted}, not {value!r}")
    named = [kwargs.get("pad_token_id"), *_flat(kwargs.get("stop_token_ids")), *_flat(kwargs.get("eos_token_id"))]
    beyond = [token for token in named if token is not None and not 0 <= token < known]
    if beyond:
        raise ConfigError(f"generation names token {beyond[0]}, but the tokenizer has {known} tokens")


def _flat(stops: int | Sequence[int | Sequence[int]] | None) -> list[int]:
    given = [stops] if isinstance(stops, int) else stops or ()
    return [token for stop in given for token in ([stop] if isinstance(stop, int) else stop)]


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

"""The form of a response: which tags it must have, how often and in which order, and what they hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlhf_core.errors import ConfigError

Tags = Mapping[str, Mapping[str, Any]]
"""coati's form: {"answer_start": {"text": "<answer>", "num_occur": 1}, ...}, in the order of the response."""

_START, _END = "_start", "_end"
OPENING, CLOSING = "answer_start", "answer_end"

DEFAULT_TAGS: Tags = {
    "think_start": {"text": "<think>", "num_occur": 1},
    "think_end": {"text": "</think>", "num_occur": 1},
    "answer_start": {"text": "<answer>", "num_occur": 1},
    "answer_end": {"text": "</answer>", "num_occur": 1},
}


def answer_tags(tag: str) -> Tags:
    """Return the tags of a response that has one pair, around its answer."""
    return {OPENING: {"text": f"<{tag}>", "num_occur": 1}, CLOSING: {"text": f"</{tag}>", "num_occur": 1}}


def check_tags(tags: Any, *, where: str = "") -> Tags:
    """Return the tags if they have coati's form.

    Args:
        tags: whatever was given for them.
        where: they stand, for the message.

    Raises:
        ConfigError: if they have not, or lack those of the answer.
    """
    right = isinstance(tags, Mapping) and all(
        isinstance(tag, Mapping)
        and isinstance(tag.get("text"), str)
        and tag["text"]
        and type(tag.get("num_occur", 1)) is int
        and tag.get("num_occur", 1) >= 0
        and set(tag) <= {"text", "num_occur"}
        for tag in tags.values()
    )
    if not right or not {OPENING, CLOSING} <= set(tags):
        raise ConfigError(
            f"response_format_tags{where} must name at least answer_start and answer_end, each as "
            f'{{"text": "<answer>", "num_occur": 1}}, but it is {tags!r:.200}'
        )
    return tags  # type: ignore[no-any-return]  # the check above is what makes it one


def is_of_tag(token: int, tokenizer: Any, tags: Tags | None = None) -> bool:
    """Return whether a token is a tag or a part of one, so that it belongs to the response even at its end.

    Args:
        token: its id.
        tokenizer: says what the id stands for.
        tags: in coati's form; None takes one think block before one answer block.
    """
    word = tokenizer.convert_ids_to_tokens(token)
    return any(word and word in tag["text"] for tag in (DEFAULT_TAGS if tags is None else tags).values())


def validate_response_structure(text: str, tags: Tags | None = None) -> bool:
    """Return whether a response has the form that the tags prescribe.

    Every tag occurs as often as its `num_occur` says (1 if it says nothing), the tags' first occurrences
    come in the order in which they are listed, and nothing but white space follows the closing answer tag.
    Two tags named `<name>_start` and `<name>_end` that occur equally often come in pairs: each is closed before
    the next is opened. What stands before or between the tags is free.

    Args:
        text: the response.
        tags: in coati's form, in the order of the response; None takes one think block before one answer block.

    Example:
        >>> validate_response_structure("<think>1+1</think> <answer>2</answer>")
        True
        >>> validate_response_structure("<think>1+1</think> <answer>2</answer> I hope so")
        False
    """
    tags = DEFAULT_TAGS if tags is None else tags
    if any(text.count(tag["text"]) != tag.get("num_occur", 1) for tag in tags.values()):
        return False
    places = [text.find(tag["text"]) for tag in tags.values() if tag.get("num_occur", 1)]
    closing = tags[CLOSING]["text"]
    in_order = places == sorted(places) and _paired(text, tags)
    return in_order and not text.rpartition(closing)[2].strip()


def _paired(text: str, tags: Tags) -> bool:
    for name, tag in tags.items():
        other = tags.get(f"{name.removesuffix(_START)}{_END}") if name.endswith(_START) else None
        if other is None or other["text"] == tag["text"] or text.count(other["text"]) != text.count(tag["text"]):
            continue
        opened, closed = (_places(text, each["text"]) for each in (tag, other))
        alternating = [place for pair in zip(opened, closed, strict=True) for place in pair]
        if alternating != sorted(alternating):
            return False
    return True


def _places(text: str, word: str) -> list[int]:
    return [match.start() for match in re.finditer(re.escape(word), text)]


def extract_answer(text: str, tags: Tags | None = None) -> str | None:
    """Return what stands in the last pair of answer tags, without white space around it; None if there is no pair."""
    tags = DEFAULT_TAGS if tags is None else tags
    before, closing, _ = text.rpartition(tags[CLOSING]["text"])
    _, opening, answer = before.rpartition(tags[OPENING]["text"])
    return answer.strip() if opening and closing else None


def filled_tags(tags: Tags, answer: str) -> str:
    """Return the shortest text that has the form and this answer.

    Example:
        >>> filled_tags(DEFAULT_TAGS, "42")
        '<think></think><answer>42</answer>'
    """
    parts = []
    for name, tag in tags.items():
        parts += [tag["text"]] * tag.get("num_occur", 1)
        if name == OPENING:
            parts.append(answer)
    return "".join(parts)

"""reasoning-gym's own scorers, which need the task's record of a problem and not its answer alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import reasoning_gym

from rlhf_core.data.entries import entry_from_json
from rlhf_core.rewards.structure import Tags, extract_answer, validate_response_structure


def score(prompt: str, response: str, answer: str | None, entry: str, *, task: str, tags: Tags) -> float:
    """Return the task's own score of the answer in its tags, from 0 to 1; 0 without them.

    Args:
        prompt: not looked at: the record has the task's own.
        response: without its stop token.
        answer: not looked at either.
        entry: the record, as `entry_to_json` wrote it.
        task: name in reasoning-gym.
        tags: the form of a response.
    """
    del prompt, answer
    given = extract_answer(response, tags)
    if given is None or not validate_response_structure(response, tags):
        return 0.0
    reread = _REREADERS.get(task)
    return float(_scorer(task)(reread(given) if reread else given, entry=entry_from_json(entry)))


@cache
def _scorer(task: str) -> Callable[..., float]:
    scorer: Callable[..., float] = reasoning_gym.get_score_answer_fn(task)
    return scorer


def _as_list(answer: str) -> str:
    """Return "1 3 5" as the library's prompt would have it: our short prompt asks for numbers alone."""
    return str(answer.replace(",", " ").split())


_REREADERS: dict[str, Callable[[str], Any]] = {"number_sorting": _as_list}

"""reasoning-gym's own scorers, which need the task's record of a problem and not its answer alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import reasoning_gym

from rlhf_core.data.gym import ADAPTERS, DRAWN, entry_from_json
from rlhf_core.rewards.structure import Tags, extract_answer, validate_response_structure

NO_ANSWER = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""What some of the library's scorers raise on a text that cannot be read as an answer to their task."""


def score(prompt: str, response: str, answer: str | None, entry: str, *, task: str, tags: Tags) -> float:
    """Return the task's own score of the answer in its tags, from 0 to 1; 0 without them.

    Args:
        prompt: not looked at: the record has the task's own.
        response: without its stop token.
        answer: not looked at either.
        entry: the record, as `entry_to_json` wrote it; one that says which task drew it, and with which parameters,
            is scored by that task with those.
        task: name in reasoning-gym.
        tags: the form of a response.
    """
    del prompt, answer
    given = extract_answer(response, tags)
    if given is None or not validate_response_structure(response, tags):
        return 0.0
    record = entry_from_json(entry)
    drawn: Mapping[str, Any] = record.pop(DRAWN, {"task": task, "parameters": {}})
    adapter = ADAPTERS.get(drawn["task"])
    scorer = _scorer(drawn["task"], json.dumps(drawn["parameters"], sort_keys=True))
    try:
        if adapter is not None and adapter.admits is not None and not adapter.admits(given, record):
            return 0.0
        return float(scorer(adapter.reread(given) if adapter else given, entry=record))
    except NO_ANSWER:
        return 0.0


@lru_cache(maxsize=64)
def _scorer(task: str, parameters: str) -> Callable[..., float]:
    scorer: Callable[..., float] = reasoning_gym.create_dataset(task, **json.loads(parameters)).score_answer
    return scorer

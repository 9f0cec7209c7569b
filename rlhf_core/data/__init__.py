"""Prompts, answers, preferences, and who judges them.

The names below are loaded when they are first used: a command that only shows help then imports no pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_core.data.preferences import (
        PreferencePair,
        VerifiedSample,
        pairs_from_jsonl,
        pairs_from_samples,
        pairs_to_jsonl,
    )
    from rlhf_core.data.problems import (
        Problem,
        problem_key,
        problems_from_jsonl,
        problems_to_jsonl,
        response_to_learn,
    )
    from rlhf_core.data.template import PromptTemplate
    from rlhf_core.data.verifiers import Verdict, verify

__all__ = [
    "PreferencePair",
    "Problem",
    "PromptTemplate",
    "Verdict",
    "VerifiedSample",
    "pairs_from_jsonl",
    "pairs_from_samples",
    "pairs_to_jsonl",
    "problem_key",
    "problems_from_jsonl",
    "problems_to_jsonl",
    "response_to_learn",
    "verify",
]

_HOMES = {
    "PreferencePair": "rlhf_core.data.preferences",
    "Problem": "rlhf_core.data.problems",
    "PromptTemplate": "rlhf_core.data.template",
    "Verdict": "rlhf_core.data.verifiers",
    "VerifiedSample": "rlhf_core.data.preferences",
    "pairs_from_jsonl": "rlhf_core.data.preferences",
    "pairs_from_samples": "rlhf_core.data.preferences",
    "pairs_to_jsonl": "rlhf_core.data.preferences",
    "problem_key": "rlhf_core.data.problems",
    "problems_from_jsonl": "rlhf_core.data.problems",
    "problems_to_jsonl": "rlhf_core.data.problems",
    "response_to_learn": "rlhf_core.data.problems",
    "verify": "rlhf_core.data.verifiers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

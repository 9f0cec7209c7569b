"""Suites beside the task: packaged questions, tasks of lm-evaluation-harness, and functions of the user's own."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.forgetting.harness import PREFIX, check_task, measure_task
from rlhf_core.forgetting.measures import Measure
from rlhf_core.forgetting.text import PASSAGES, packaged_passages, text_cross_entropy, token_logprobs
from rlhf_core.rewards.resolve import FunctionPath, code_digest, own_function

if TYPE_CHECKING:
    from rlhf_core.config import ForgettingConfig

QUESTIONS = "questions"
_FILE = Path(__file__).parent / "questions.txt"


class Question(NamedTuple):
    """A question with four options."""

    question: str
    options: Sequence[str]
    """The right one first; each is scored alone, so their order has no effect."""


def check_suites(config: ForgettingConfig, allowed_modules: Sequence[str]) -> None:
    """Refuse a suite that could not be measured, before anything is loaded or run.

    Raises:
        ConfigError: there are fewer passages; a suite has no such name, is not allowed, or needs what is not installed.
    """
    packaged_passages(config.passages)
    for suite in config.suites:
        if suite.startswith(PREFIX):
            check_task(suite, config)
        elif suite != QUESTIONS:
            _target(suite, allowed_modules)


def suite_facts(config: ForgettingConfig) -> dict[str, str | None]:
    """Return what figures depend on besides the configuration: the packaged texts, and the code of functions."""
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (PASSAGES, _FILE)}
    own = [suite for suite in config.suites if suite != QUESTIONS and not suite.startswith(PREFIX)]
    return {**files, **{suite: code_digest(suite) for suite in own}}


def measure(
    model: Any, tokenizer: Any, config: ForgettingConfig, *, dtype: torch.dtype, allowed_modules: Sequence[str]
) -> list[Measure]:
    """Return what a policy still knows, by the suites of a configuration.

    Args:
        model: a causal language model; its mode comes out as it was.
        tokenizer: the model's.
        config: which suites.
        dtype: arithmetic of the passes.
        allowed_modules: modules and packages from which functions may be taken.

    Raises:
        ConfigError: as `check_suites`.
        RlhfError: a user's function fails, or returns no numbers.
    """
    check_suites(config, allowed_modules)
    found = []
    if config.passages:
        passages = packaged_passages(config.passages)
        found.append(text_cross_entropy(model, tokenizer, passages, most=config.passage_tokens, dtype=dtype))
    for suite in config.suites:
        if suite == QUESTIONS:
            found.append(answer_questions(model, tokenizer, packaged_questions(), dtype=dtype))
        elif suite.startswith(PREFIX):
            found.append(measure_task(suite, model, tokenizer, config, dtype=dtype))
        else:
            found.append(_call(suite, model, tokenizer, allowed_modules))
    return found


def packaged_questions() -> list[Question]:
    """Return the packaged questions: general knowledge, common sense, arithmetic, language, following instructions."""
    rows = [line.split(" | ") for line in _FILE.read_text(encoding="utf-8").splitlines()]
    return [Question(question, options) for question, *options in rows]


def answer_questions(model: Any, tokenizer: Any, questions: Sequence[Question], *, dtype: torch.dtype) -> Measure:
    """Return 1 for each question whose right option is the likeliest, else 0.

    Options are compared by their mean log-probability per token after "Question: ... Answer:".

    Args:
        model: a causal language model; its mode comes out as it was.
        tokenizer: the model's.
        questions: at least one; no two alike.
        dtype: arithmetic of the passes.
    """
    rows, starts = [], []
    for each in questions:
        asked = f"Question: {each.question}\nAnswer:"
        start = len(tokenizer(asked)["input_ids"])
        for option in each.options:
            rows.append(tokenizer(f"{asked} {option}")["input_ids"])
            starts.append(start)
    found = token_logprobs(model, rows, dtype=dtype)
    means = iter([logprobs[start - 1 :].mean().item() for logprobs, start in zip(found, starts, strict=True)])
    values = {}
    for each in questions:
        likely = [next(means) for _ in each.options]
        values[each.question] = float(likely[0] > max(likely[1:]))
    return Measure(QUESTIONS, values)


def _target(suite: str, allowed_modules: Sequence[str]) -> FunctionPath:
    """Return module and function of a user's suite.

    Raises:
        ConfigError: it is none, or its module is not allowed.
    """
    found = own_function(suite, allowed_modules=allowed_modules, what="suite")
    if found is None:
        raise ConfigError(
            f"evaluation.forgetting.suites names {suite!r}; expected {QUESTIONS}, {PREFIX}<task> or "
            "package.module:function"
        )
    return found


def _call(suite: str, model: Any, tokenizer: Any, allowed_modules: Sequence[str]) -> Measure:
    module, function = _target(suite, allowed_modules)
    try:
        values = getattr(importlib.import_module(module), function)(model, tokenizer)
    except Exception as error:
        raise RlhfError(f"the suite {suite} failed: {type(error).__name__}: {error}") from error
    if (
        not isinstance(values, Mapping)
        or not values
        or not all(isinstance(each, int | float) and isfinite(each) for each in values.values())
    ):
        raise RlhfError(
            f"the suite {suite} must return a number for each item by its name, but returned {values!r:.200}"
        )
    return Measure(suite, {str(name): float(value) for name, value in values.items()})

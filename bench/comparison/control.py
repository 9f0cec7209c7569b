"""The control: the time and the problems of PPO, spent on more supervised learning from the same start.

The number of steps is the time of PPO's episodes over the time of one step, measured in the same process; rate, warm-up
and decay are the preset's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from bench.comparison.runs import Run
from infra.artifacts import ArtifactStore
from infra.settings import settings
from rlhf_core.config import PipelineConfig
from rlhf_core.data.conversation import EncodedConversation
from rlhf_core.data.encoding import encode_demonstrations
from rlhf_core.data.problems import Problem, problems_from_jsonl
from rlhf_core.data.template import PromptTemplate
from rlhf_core.evaluation import Outcome, evaluate_policy
from rlhf_core.models.loading import default_device, load_causal_lm, load_tokenizer
from rlhf_core.rewards.verifying import judge_of
from rlhf_core.supervised.sft import train_sft

UNSTEADY, MEASURED = 2, 6  # steps that warm the machine up, and those whose time is taken
SAID_EVERY = 20
T = TypeVar("T")


class Control(NamedTuple):
    """What more supervised learning came to."""

    outcomes: list[Outcome]
    steps: int
    seconds: float
    """That the steps took."""
    demonstrations: int
    """Different ones."""
    last_loss: float


def more_sft(store: ArtifactStore, run: Run, demonstrate: Callable[[Problem], str] | None) -> Control:
    """Train the run's SFT model for as long as its PPO took, and evaluate it on the same held-out problems.

    Args:
        store: holds the run's artifacts.
        run: a finished pipeline.
        demonstrate: who responds to PPO's problems; None takes their right answers.
    """
    config = run.config
    start, data = store.cached(run.stages["sft"]["uri"]), store.cached(run.stages["data"]["uri"])
    template = PromptTemplate(load_tokenizer(start), config.template)
    problems = problems_from_jsonl((data / "ppo.jsonl").read_bytes())
    if demonstrate is not None:
        problems = [replace(problem, demonstration=demonstrate(problem)) for problem in problems]
    examples = encode_demonstrations(problems, template)
    budget = float(run.stages["ppo"]["seconds"])
    steps = steps_within(budget, seconds_of_a_step(start, examples, config))
    model = load_causal_lm(start, "float32", device=default_device())
    started = time.perf_counter()
    history = _train(model, taken_in_turn(examples, steps * config.sft.batch_size), config)
    seconds = time.perf_counter() - started
    held_out = problems_from_jsonl((data / "evaluation.jsonl").read_bytes())
    outcomes = _evaluated(model, template, held_out, config)
    return Control(outcomes, len(history), seconds, len(examples), history[-1]["loss"])


def seconds_of_a_step(start: Path, examples: Sequence[EncodedConversation], config: PipelineConfig) -> float:
    """Return the mean time of an optimizer step, on a model that is thrown away."""
    model = load_causal_lm(start, "float32", device=default_device())
    ended: list[float] = []
    rows = taken_in_turn(examples, (UNSTEADY + MEASURED) * config.sft.batch_size)
    _train(model, rows, config, on_step=lambda _: ended.append(time.perf_counter()))
    return (ended[-1] - ended[UNSTEADY - 1]) / (len(ended) - UNSTEADY)


def steps_within(budget_s: float, step_s: float) -> int:
    """Return how many steps a time has room for, at least one.

    Example:
        >>> steps_within(10.0, 3.0), steps_within(1.0, 3.0)
        (3, 1)
    """
    return max(1, int(budget_s / step_s))


def taken_in_turn(examples: Sequence[T], count: int) -> list[T]:
    """Return so many examples: the first ones, or all of them again and again.

    One pass over the result is the whole training, so that the rate decays once, over all of it.
    """
    return list(islice(cycle(examples), count))


def _train(
    model: Any, examples: Sequence[EncodedConversation], config: PipelineConfig, on_step: Any = None
) -> list[Any]:
    once = config.sft.model_copy(update={"epochs": 1})
    dtype = getattr(torch, config.sft.dtype)
    return train_sft(model, examples, once, seed=config.seed, autocast_dtype=dtype, on_step=on_step or _say).history


def _say(step: Any) -> None:
    if int(step["step"]) % SAID_EVERY == 0:
        sys.stderr.write(f"more SFT: step {int(step['step'])}, loss {step['loss']:.4f}\n")


def _evaluated(
    model: Any, template: PromptTemplate, problems: Sequence[Problem], config: PipelineConfig
) -> list[Outcome]:
    judge = judge_of(config, template=template, allowed_modules=settings().reward_modules)
    if judge is None:
        raise SystemExit(f"{config.name} has no verifier to evaluate with; take a preset whose problems have answers")
    try:
        return evaluate_policy(model, template, problems, config.evaluation, judge=judge)
    finally:
        judge.close()

"""Greedy answers to held-out problems. Each outcome is stored, so that policies can be compared later."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rlhf_core.data.jsonl import from_jsonl, to_jsonl
from rlhf_core.data.problems import category_of
from rlhf_core.errors import DataError
from rlhf_core.functional.intervals import mean_interval, wilson_interval
from rlhf_core.generation import GenerationSettings, make_engine
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.models.trunk import autocast, device_of
from rlhf_core.rewards.abstaining import check_share
from rlhf_core.rewards.sources import REWARD_MODEL, ScoringBatch, TrainedScores
from rlhf_core.rewards.structure import filled_tags
from rlhf_core.rewards.verifying import RIGHT, Answered, Judge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rlhf_core.config import EvaluationConfig
    from rlhf_core.data.problems import Problem
    from rlhf_core.data.template import PromptTemplate

SPARE_TOKENS = 2  # a response that runs past the longest right one is seen to run past it
CONSTANTS = 50
"""Constant answers that are tried at most, the most common references first."""
CONSTANT_VERDICTS = 5000
"""Verdicts that are asked for them: of many problems fewer constants are tried, as a verifier may take its time."""


FEWEST_JUDGED = 2
"""Problems with a verdict: an interval needs two."""


@dataclass(frozen=True)
class Outcome:
    """What a policy made of one problem."""

    key: str
    prompt: str
    answer: str
    """The reference; empty if there is none."""
    response: str
    correct: bool
    """The judge gave it the full score; never, where a reward model judges."""
    well_formed: bool
    """It has the form that the judge wants; where a reward model judges, it ended."""
    truncated: bool
    """The response was cut off at `max_new_tokens`."""
    score: float
    """From 0 to 1, where 1 is right; of a reward model, in its standard deviations."""
    tokens: int | None = None
    """Of the response, the stop token included; None in an evaluation of an earlier release, as is no category."""
    category: str = ""
    """What kind of problem it is, by the problem's own record; empty if that names none."""
    failure: str = ""
    """Why nobody knows whether it is right (`rewards.abstaining.failure`): it then counts neither way."""


class ConstantAnswer(NamedTuple):
    """What a policy would reach by giving every problem the same answer."""

    answer: str
    accuracy: float


def evaluate_policy(
    model: Any,
    template: PromptTemplate,
    problems: Sequence[Problem],
    config: EvaluationConfig,
    judge: Judge | RewardModel,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """Return the outcome of each problem, in order, by greedy decoding.

    Args:
        model: a causal language model.
        template: how prompts are put and responses read.
        problems: at least one.
        config: length of the responses, how many are made at once, and in which arithmetic.
        judge: the data's verifier, left open, or a reward model, whose standardised score counts.
        on_progress: called with the number of problems done and of all, after each batch.

    Raises:
        DataError: before anything is generated, if there is no problem or the longest right response does not fit;
            if the verifier has nothing to judge a problem by.
    """
    check_response_length(template, problems, config)
    outcomes: list[Outcome] = []
    for start in range(0, len(problems), config.batch_size):
        batch = problems[start : start + config.batch_size]
        outcomes += _evaluate_batch(model, template, batch, config, judge)
        if on_progress is not None:
            on_progress(len(outcomes), len(problems))
    return outcomes


def check_response_length(template: PromptTemplate, problems: Sequence[Problem], config: EvaluationConfig) -> None:
    """Refuse a limit that would cut off a right response, which would then score 0.

    Raises:
        DataError: if there is no problem, or the response to one that has an answer is too long.
    """
    if not problems:
        raise DataError("there is no problem to evaluate on; give data.splits.evaluation at least one")
    answers = {problem.answer for problem in problems if problem.answer is not None}
    lengths = {answer: len(template.response_ids(template.answer_text(answer))) for answer in answers}
    if not lengths:
        return
    longest = max(lengths, key=lengths.__getitem__)
    needed = lengths[longest] + SPARE_TOKENS
    if config.max_new_tokens < needed:
        raise DataError(
            f"evaluation.max_new_tokens is {config.max_new_tokens}, but the longest right response takes "
            f"{lengths[longest]} tokens (answer {longest[:40]!r}); raise it to {needed} or more"
        )


def _evaluate_batch(
    model: Any,
    template: PromptTemplate,
    problems: Sequence[Problem],
    config: EvaluationConfig,
    judge: Judge | RewardModel,
) -> list[Outcome]:
    settings = GenerationSettings(
        max_new_tokens=config.max_new_tokens,
        stop_ids=template.stop_ids,
        pad_id=template.pad_id,
        stop_strings=template.stop_strings,
    )
    prompts = [template.prompt_ids(problem.prompt) for problem in problems]
    with autocast(device_of(model), getattr(torch, config.dtype)):
        made = make_engine("native", model, tokenizer=template.tokenizer).generate(prompts, settings, uniforms=None)
    tokens, lengths = made.sequences[:, -made.action_mask.shape[1] :], made.action_mask.sum(dim=1).tolist()
    responses = [
        template.decode_response(row[mask].tolist()) for row, mask in zip(tokens, made.action_mask, strict=True)
    ]
    failures = [""] * len(problems)
    if isinstance(judge, RewardModel):
        masks = (made.attention_mask, made.action_mask)
        scores = TrainedScores(judge)(ScoringBatch((), responses, made.ended, made.sequences, *masks)).scaled.tolist()
        formed, right = made.ended.tolist(), [False] * len(problems)
    else:
        verdicts = judge.judge(answered(problems, responses, made.ended.tolist()))
        scores, formed = [verdict.score for verdict in verdicts], [verdict.well_formed for verdict in verdicts]
        right = [score >= RIGHT for score in scores]
        failures = [verdict.failure or "" for verdict in verdicts]
    return [
        Outcome(
            key=problem.key,
            prompt=problem.prompt,
            answer=problem.answer or "",
            response=responses[row],
            correct=right[row],
            well_formed=formed[row],
            truncated=not made.ended[row],
            score=scores[row],
            tokens=lengths[row],
            category=category_of(problem),
            failure=failures[row],
        )
        for row, problem in enumerate(problems)
    ]


def answered(problems: Iterable[Problem], responses: Iterable[str], ended: Iterable[bool]) -> list[Answered]:
    """Return problems with a response each, as a judge takes them."""
    return [
        Answered(problem.prompt, response, problem.answer, problem.entry, problem.key, end)
        for problem, response, end in zip(problems, responses, ended, strict=True)
    ]


def best_constant(problems: Sequence[Problem], template: PromptTemplate, judge: Judge) -> ConstantAnswer | None:
    """Return the answer that, given to every problem, is right most often; None if no problem has a reference.

    A policy's accuracy must be compared with this: where most answers are 1, to answer 1 always looks like skill.

    Args:
        problems: held-out ones.
        template: how an answer is put.
        judge: the data's verifier, left open.
    """
    references = Counter(problem.answer for problem in problems if problem.answer is not None)
    best: ConstantAnswer | None = None
    for answer, _ in references.most_common(min(CONSTANTS, max(1, CONSTANT_VERDICTS // max(1, len(problems))))):
        verdicts = judge.judge(answered(problems, [_put(answer, template)] * len(problems), [True] * len(problems)))
        if not all(verdict.well_formed for verdict in verdicts):  # this judge wants the answer's tags alone
            response = template.answer_text(answer)
            verdicts = judge.judge(answered(problems, [response] * len(problems), [True] * len(problems)))
        known = [verdict.score >= RIGHT for verdict in verdicts if verdict.failure is None]
        found = ConstantAnswer(answer, fmean(known or [0.0]))
        best = found if best is None or found.accuracy > best.accuracy else best
    return best


def _put(answer: str, template: PromptTemplate) -> str:
    return template.answer_text(answer) if template.tags is None else filled_tags(template.tags, answer)


def judged(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the outcomes that are known: what the judge failed at is neither right nor wrong."""
    return [outcome for outcome in outcomes if not outcome.failure]


def check_judged(outcomes: Sequence[Outcome], *, judge: str, most: float, what: str) -> None:
    """See that enough answers were judged for figures.

    Args:
        outcomes: of all problems.
        judge: its name.
        most: the largest share that may have no verdict, `ppo.max_abstained`.
        what: the answers are.

    Raises:
        DataError: if more have none, or fewer than two have one.
    """
    failures = [{judge: outcome.failure} for outcome in outcomes if outcome.failure]
    check_share(failures, abstained=len(failures), of=len(outcomes), most=most, what=what, error=DataError)
    if len(outcomes) - len(failures) < FEWEST_JUDGED:
        raise DataError(
            f"{len(failures)} of {len(outcomes)} {what} could not be judged, and figures need {FEWEST_JUDGED} that "
            f"could; repair the judge {judge}, or raise data.splits.evaluation"
        )


def evaluation_metrics(outcomes: Sequence[Outcome], judge: str, confidence: float) -> dict[str, Any]:
    """Return an evaluation in numbers, with the interval of what counts.

    Args:
        outcomes: at least two that were judged.
        judge: name of the verifier, or `reward_model`.
        confidence: of the interval, in (0, 1).

    Returns:
        problems (those that were judged, of which all else is), unjudged (those that were not), judge, score (mean),
        well_formed and truncated (as parts of 1), low and high. Unless a reward model judged, also accuracy (the part
        that is right; the interval is then of this) and accuracy_given_form (the part of the well formed that is right;
        0 if none is).
    """
    asked = len(outcomes)
    outcomes = judged(outcomes)
    scores = [outcome.score for outcome in outcomes]
    metrics: dict[str, Any] = {
        "problems": len(outcomes),
        "unjudged": asked - len(outcomes),
        "judge": judge,
        "score": fmean(scores),
        "well_formed": fmean(outcome.well_formed for outcome in outcomes),
        "truncated": fmean(outcome.truncated for outcome in outcomes),
    }
    if judge == REWARD_MODEL:
        interval = mean_interval(scores, confidence)
    else:
        right = sum(outcome.correct for outcome in outcomes)
        interval = wilson_interval(right, len(outcomes), confidence)
        formed = [outcome.correct for outcome in outcomes if outcome.well_formed]
        metrics |= {"accuracy": interval.estimate, "accuracy_given_form": fmean(formed) if formed else 0.0}
    return metrics | {"low": interval.low, "high": interval.high}


def outcomes_to_jsonl(outcomes: Iterable[Outcome]) -> bytes:
    """Return the outcomes as JSON lines."""
    return to_jsonl(asdict(outcome) for outcome in outcomes)


def outcomes_from_jsonl(data: bytes) -> list[Outcome]:
    """Return the outcomes that `outcomes_to_jsonl` wrote."""
    return [Outcome(**row) for row in from_jsonl(data)]

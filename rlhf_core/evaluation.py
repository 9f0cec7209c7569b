"""Greedy answers on held-out problems, each kept: comparing two policies is arithmetic over stored outcomes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.data.jsonl import from_jsonl, to_jsonl
from rlhf_core.data.verifiers import verify
from rlhf_core.errors import DataError
from rlhf_core.generation import GenerationSettings, make_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rlhf_core.config import EvaluationConfig
    from rlhf_core.data.problems import Problem
    from rlhf_core.data.template import PromptTemplate

SPARE_TOKENS = 2  # a response that runs past the longest right one is seen to run past it


@dataclass(frozen=True)
class Outcome:
    """What a policy made of one problem."""

    key: str
    prompt: str
    answer: str
    response: str
    correct: bool
    well_formed: bool
    truncated: bool
    """The response was cut off at `max_new_tokens`."""


def evaluate_policy(
    model: Any,
    template: PromptTemplate,
    problems: Sequence[Problem],
    config: EvaluationConfig,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """Return the outcome of each problem, in order, by greedy decoding.

    Args:
        model: a causal language model.
        template: how prompts are put and responses read.
        problems: at least one.
        config: length of the responses, and how many are made at once.
        on_progress: called with the number of problems done and of all, after each batch.

    Raises:
        DataError: before anything is generated, if there is no problem or the longest right response does not fit.
    """
    check_response_length(template, problems, config)
    outcomes: list[Outcome] = []
    for start in range(0, len(problems), config.batch_size):
        outcomes += _evaluate_batch(model, template, problems[start : start + config.batch_size], config)
        if on_progress is not None:
            on_progress(len(outcomes), len(problems))
    return outcomes


def check_response_length(template: PromptTemplate, problems: Sequence[Problem], config: EvaluationConfig) -> None:
    """Check that every right response fits: one that is cut off scores 0, and nothing else would tell.

    Raises:
        DataError: if there is no problem, or one's response is too long.
    """
    if not problems:
        raise DataError("there is no problem to evaluate on; give data.splits.evaluation at least one")
    lengths = {problem.answer: len(template.response_ids(template.answer_text(problem.answer))) for problem in problems}
    longest = max(lengths, key=lengths.__getitem__)
    needed = lengths[longest] + SPARE_TOKENS
    if config.max_new_tokens < needed:
        raise DataError(
            f"evaluation.max_new_tokens is {config.max_new_tokens}, but the longest right response takes "
            f"{lengths[longest]} tokens (answer {longest[:40]!r}); raise it to {needed} or more"
        )


def _evaluate_batch(
    model: Any, template: PromptTemplate, problems: Sequence[Problem], config: EvaluationConfig
) -> list[Outcome]:
    settings = GenerationSettings(
        max_new_tokens=config.max_new_tokens,
        stop_ids=template.stop_ids,
        pad_id=template.pad_id,
        stop_strings=template.stop_strings,
    )
    prompts = [template.prompt_ids(problem.prompt) for problem in problems]
    generation = make_engine("native", model, tokenizer=template.tokenizer).generate(prompts, settings, uniforms=None)
    responses = generation.sequences[:, -generation.action_mask.shape[1] :]
    outcomes = []
    rows = zip(problems, responses, generation.action_mask, generation.ended.tolist(), strict=True)
    for problem, tokens, mask, ended in rows:
        response = template.decode_response(tokens[mask].tolist())
        verdict = verify(response, problem.answer, ended=ended, tag=template.answer_tag)
        outcomes.append(
            Outcome(
                key=problem.key,
                prompt=problem.prompt,
                answer=problem.answer,
                response=response,
                correct=verdict.score == 1.0,
                well_formed=verdict.well_formed,
                truncated=not ended,
            )
        )
    return outcomes


def outcomes_to_jsonl(outcomes: Iterable[Outcome]) -> bytes:
    """Return the outcomes as JSON lines."""
    return to_jsonl(asdict(outcome) for outcome in outcomes)


def outcomes_from_jsonl(data: bytes) -> list[Outcome]:
    """Return the outcomes that `outcomes_to_jsonl` wrote."""
    return [Outcome(**row) for row in from_jsonl(data)]

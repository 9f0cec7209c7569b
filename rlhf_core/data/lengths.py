"""Do prompts and answers fit the limits of the stages that will read them?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from rlhf_core.config import PipelineConfig
    from rlhf_core.data.problems import Problem
    from rlhf_core.data.template import PromptTemplate

ROOM = 2
"""Tokens that a greedy answer may have beyond the longest reference: one that is cut off would count as wrong."""


def check_lengths(template: PromptTemplate, splits: Mapping[str, Sequence[Problem]], config: PipelineConfig) -> None:
    """Compare demonstrations, prompts of PPO and reference answers with the configuration, before any training.

    Args:
        template: of the model that will read them.
        splits: problems by split; those that are absent are not checked.
        config: holds the limits.

    Raises:
        DataError: something is longer than its limit; the message has how long, how many, and the key to raise.
    """

    def response(problem: Problem) -> int:
        return len(template.response_ids(template.answer_text(problem.answer)))

    def prompt(problem: Problem) -> int:
        return len(template.prompt_ids(problem.prompt))

    demonstrations = (prompt(problem) + response(problem) for problem in splits.get("sft", ()))
    _check("demonstrations", demonstrations, config.sft.max_length, "sft.max_length")
    prompts = (prompt(problem) for problem in splits.get("ppo", ()))
    _check("prompts", prompts, config.ppo.max_prompt_tokens, "ppo.max_prompt_tokens")
    answers = (response(problem) + ROOM for problem in splits.get("evaluation", ()))
    _check(
        f"answers (with {ROOM} tokens of room)", answers, config.evaluation.max_new_tokens, "evaluation.max_new_tokens"
    )


def _check(what: str, lengths: Iterable[int], limit: int, key: str) -> None:
    found = list(lengths)
    longer = [length for length in found if length > limit]
    if longer:
        raise DataError(
            f"{len(longer)} of {len(found)} {what} are longer than {key} = {limit} tokens, the longest {max(longer)}; "
            f"raise {key} or leave those problems out"
        )

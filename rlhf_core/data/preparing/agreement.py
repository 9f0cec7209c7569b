"""Do the data and the verifier speak of the same thing? Asked before anything is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rlhf_core.data.problems import response_to_learn
from rlhf_core.errors import DataError
from rlhf_core.rewards.verifying import Answered, judge_of, verifier_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlhf_core.config import PipelineConfig
    from rlhf_core.data.problems import Problem
    from rlhf_core.data.template import PromptTemplate
    from rlhf_core.rewards.verifying import Judge

ASKED, ASKED_OF_OTHERS = 64, 8
"""Rows that the verifier is asked about, of what is learnt and of each other split: some take a second each."""
LEARNT = "sft"
SHOWN = 80
NO_THOUGHT = "<think></think>"


class Agreement(NamedTuple):
    """How much of what is to be learnt the verifier accepts; of the problems' answers where that is not known."""

    verifier: str
    asked: int
    accepted: int
    split: str

    def __str__(self) -> str:
        """Return it as one clause."""
        return f"{self.verifier} accepts {self.accepted} of {self.asked} {_what(self.split)}"


def ask_verifier(
    splits: Mapping[str, Sequence[Problem]],
    config: PipelineConfig,
    template: PromptTemplate,
    *,
    allowed_modules: Sequence[str],
) -> Agreement | None:
    """Return what the verifier says of demonstrations, or of answers in their tags; None where nothing has answers.

    Raises:
        DataError: if it accepts none of a split's: the splits may come from different sets.
        ConfigError: if there is no such verifier.
    """
    name = verifier_name(config.data)
    answered = {
        split: known for split, problems in splits.items() if (known := [p for p in problems if p.answer is not None])
    }
    judge = judge_of(config, template=template, allowed_modules=allowed_modules) if answered else None
    if judge is None or name is None:
        return None
    try:
        told = LEARNT if LEARNT in answered else next(iter(answered))
        found = {
            split: agree(judge, name, rows[: ASKED if split == told else ASKED_OF_OTHERS], template, split=split)
            for split, rows in answered.items()
        }
    finally:
        judge.close()
    return found[told]


def agree(
    judge: Judge, name: str, problems: Sequence[Problem], template: PromptTemplate, *, split: str = LEARNT
) -> Agreement:
    """Return how many of the problems' demonstrations, or answers in their tags, a judge accepts.

    An answer that is not to be learnt may also stand after a thought: some verifiers want one before they read it.

    Raises:
        DataError: if it accepts none.
    """
    accepted = _accepted(judge, problems, [response_to_learn(each, template) for each in problems])
    if not accepted and split != LEARNT:
        thought = [f"{NO_THOUGHT}{response_to_learn(each, template)}" for each in problems]
        accepted = _accepted(judge, problems, thought)
    if not accepted:
        first = problems[0]
        raise DataError(
            f"the data and the verifier disagree: {name} accepts none of {len(problems)} {_what(split)}, such as "
            f"{_short(response_to_learn(first, template))} for the answer {_short(first.answer or '')}; name another "
            "data.verifier, or correct the answers, the demonstrations or template.answer_tag"
        )
    return Agreement(name, len(problems), accepted, split)


def _accepted(judge: Judge, problems: Sequence[Problem], responses: Sequence[str]) -> int:
    rows = [
        Answered(each.prompt, response, each.answer, each.entry, each.key, ended=True)
        for each, response in zip(problems, responses, strict=True)
    ]
    return sum(verdict.score >= 1 for verdict in judge.judge(rows))


def _what(split: str) -> str:
    return "demonstrations" if split == LEARNT else f"answers of the {split} problems"


def _short(text: str) -> str:
    """Return both ends of a text: a demonstration's verdict often hangs on its last words."""
    return repr(text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}")

"""How long rows are in tokens, each text counted once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rlhf_core.data.problems import response_to_learn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rlhf_core.data.preferences import PreferencePair
    from rlhf_core.data.problems import Problem
    from rlhf_core.data.template import PromptTemplate

BATCH = 1024
"""Texts that go to the tokenizer at once: in parallel, but not all in memory as tokens."""


class Lengths(NamedTuple):
    """Tokens of a problem."""

    text: str
    """The prompt, which names the row."""
    prompt: int
    response: int | None
    """Of the demonstration, or of the answer in its tags, the stop token included; None for an open prompt."""
    has_answer: bool


class PairLengths(NamedTuple):
    """Tokens of a preference pair, each response with its stop token."""

    text: str
    """The prompt, which names the row."""
    prompt: int
    chosen: int
    rejected: int


class TokenMeter:
    """Measures rows with a template, and remembers: a row is asked about before and after the splits are filled."""

    def __init__(self, template: PromptTemplate) -> None:
        self.template = template
        self._prompts: dict[str, int] = {}
        self._responses: dict[str, int] = {}

    def problems(self, problems: Sequence[Problem]) -> list[Lengths]:
        """Return the tokens of each problem's prompt and response."""
        prompts = self._of_prompts([problem.prompt for problem in problems])
        known = [problem.demonstration is not None or problem.answer is not None for problem in problems]
        learnt = [
            response_to_learn(problem, self.template) for problem, there in zip(problems, known, strict=True) if there
        ]
        counts = iter(self._of_responses(learnt))
        return [
            Lengths(problem.prompt, prompt, next(counts) if there else None, problem.answer is not None)
            for problem, prompt, there in zip(problems, prompts, known, strict=True)
        ]

    def pairs(self, pairs: Sequence[PreferencePair]) -> list[PairLengths]:
        """Return the tokens of each pair's prompt and responses."""
        prompts = self._of_prompts([pair.prompt for pair in pairs])
        chosen = self._of_responses([pair.chosen for pair in pairs])
        rejected = self._of_responses([pair.rejected for pair in pairs])
        return [PairLengths(pair.prompt, *each) for pair, *each in zip(pairs, prompts, chosen, rejected, strict=True)]

    def _of_prompts(self, prompts: Sequence[str]) -> list[int]:
        return self._counted(prompts, self._prompts, self.template.prompt_text)

    def _of_responses(self, responses: Sequence[str]) -> list[int]:
        return [count + 1 for count in self._counted(responses, self._responses, str)]

    def _counted(self, texts: Sequence[str], known: dict[str, int], put: Callable[[str], str]) -> list[int]:
        fresh = list(dict.fromkeys(text for text in texts if text not in known))
        for start in range(0, len(fresh), BATCH):
            batch = fresh[start : start + BATCH]
            known.update(zip(batch, self.template.count_tokens([put(text) for text in batch]), strict=True))
        return [known[text] for text in texts]

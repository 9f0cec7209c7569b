"""Problems: a prompt, and what is known of a good response."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlhf_core.data.jsonl import from_jsonl, to_jsonl
from rlhf_core.data.transcripts import is_plain, turns
from rlhf_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rlhf_core.data.template import PromptTemplate


@dataclass(frozen=True)
class Problem:
    """A prompt, with what is known of a good response to it."""

    prompt: str
    r"""Plain text, or a transcript ("\n\nHuman: ...\n\nAssistant:", optionally with a system turn first).

    Of its turns' further keys it has those that the chat template shows.
    """
    answer: str | None = None
    """The right one, which a verifier compares with; None for an open prompt."""
    entry: str | None = field(default=None, compare=False, repr=False)
    """The task's own record of the problem, as JSON, which its scorer needs; None for problems of a file."""
    demonstration: str | None = field(default=None, compare=False)
    """A whole response to learn; None learns the answer in its tags."""
    category: str | None = field(default=None, compare=False)
    """What kind of problem it is, by its row; the gate looks at each kind."""

    @property
    def key(self) -> str:
        """Names the problem in splits, random streams and outcomes."""
        return problem_key(self.prompt)


def problem_key(prompt: str) -> str:
    """Return what two prompts share if they differ in case and white space alone: 16 hex digits.

    A transcript of one turn is that turn.

    Example:
        >>> problem_key("Sort  ascending: 3 1") == problem_key("sort ascending: 3 1 ")
        True
    """
    said = turns(prompt)
    text = said[0]["content"] if said is not None and len(said) == 1 and is_plain(said) else prompt
    normalised = " ".join(text.casefold().split())
    return hashlib.sha256(normalised.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def category_of(problem: Problem) -> str:
    """Return the category of a problem's row, else the task that it was drawn from; empty where neither is known.

    Example:
        >>> category_of(Problem("1+1?", entry='{"drawn": {"task": "basic_arithmetic", "parameters": {}}}'))
        'basic_arithmetic'
    """
    if problem.category is not None:
        return problem.category
    drawn = json.loads(problem.entry).get("drawn") if problem.entry else None
    return str(drawn["task"]) if isinstance(drawn, dict) and "task" in drawn else ""


def has_response_to_learn(problem: Problem) -> bool:
    """Return whether there is something to learn: a response of the problem's own, or an answer."""
    return problem.demonstration is not None or problem.answer is not None


def response_to_learn(problem: Problem, template: PromptTemplate) -> str:
    """Return what supervised fine-tuning teaches: the demonstration, else the answer in its tags.

    Raises:
        DataError: if the problem has neither.
    """
    if problem.demonstration is not None:
        return problem.demonstration
    if problem.answer is None:
        raise DataError(
            f"the prompt {problem.prompt[:40]!r} has neither a response nor an answer, so there is nothing to learn; "
            "give data.demonstrations, or problems with answers"
        )
    return template.answer_text(problem.answer)


def refuse_nothing_to_learn(problems: Iterable[Problem], *, where: str) -> None:
    """Check that there is something to learn.

    Args:
        problems: of the split for supervised fine-tuning.
        where: names the dataset.

    Raises:
        DataError: if no problem shows a response.
    """
    if not any(map(has_response_to_learn, problems)):
        raise DataError(
            f"{where} has no demonstrations to learn: none of its rows for SFT has a response or an answer; give "
            "data.demonstrations, or problems with answers, or go on without SFT (the parameter `actor`)"
        )


def of_the_same_kind(problems: Iterable[Problem], shown: Iterable[Problem]) -> list[Problem]:
    """Return those problems that show a response as others do: one of their own, or the answer in its tags.

    The loss of bare answers says little of a model that learns whole responses.

    Args:
        problems: to choose from, such as the held-out ones.
        shown: those that are learnt.
    """
    kinds = {problem.demonstration is None for problem in shown}
    return [each for each in problems if has_response_to_learn(each) and (each.demonstration is None) in kinds]


def problems_to_jsonl(problems: Iterable[Problem]) -> bytes:
    """Return the problems as JSON lines of {"question", "answer", "entry", "response", "category"}, as far as known."""
    return to_jsonl(
        {
            name: value
            for name, value in (
                ("question", problem.prompt),
                ("answer", problem.answer),
                ("entry", problem.entry),
                ("response", problem.demonstration),
                ("category", problem.category),
            )
            if value is not None
        }
        for problem in problems
    )


def problems_from_jsonl(data: bytes) -> list[Problem]:
    """Return the problems that `problems_to_jsonl` wrote."""
    return [
        Problem(row["question"], *(row.get(name) for name in ("answer", "entry", "response", "category")))
        for row in from_jsonl(data)
    ]

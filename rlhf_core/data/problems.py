"""Problems: a prompt, and the answer that the verifier expects."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlhf_core.data.jsonl import from_jsonl, to_jsonl

if TYPE_CHECKING:
    from collections.abc import Iterable


def problem_key(prompt: str) -> str:
    """Return what two prompts share if they differ in case and white space alone: 16 hex digits.

    Example:
        >>> problem_key("Sort  ascending: 3 1") == problem_key("sort ascending: 3 1 ")
        True
    """
    normalised = " ".join(prompt.casefold().split())
    return hashlib.sha256(normalised.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True)
class Problem:
    """A prompt with one right answer.

    Its demonstration, for supervised fine-tuning, is the answer in the answer tags (`<answer>42</answer>`):
    no solution is shown, also where a file has one.
    """

    prompt: str
    answer: str
    entry: str | None = field(default=None, compare=False, repr=False)
    """The task's own record of the problem, as JSON, which its scorer needs; None for problems of a file."""

    @property
    def key(self) -> str:
        """Names the problem in splits, random streams and outcomes."""
        return problem_key(self.prompt)


def problems_to_jsonl(problems: Iterable[Problem]) -> bytes:
    """Return the problems as JSON lines of {"question", "answer"}, which `read_problems` reads too.

    A problem with a record of its task has it under "entry".
    """
    return to_jsonl(
        {"question": problem.prompt, "answer": problem.answer}
        | ({} if problem.entry is None else {"entry": problem.entry})
        for problem in problems
    )


def problems_from_jsonl(data: bytes) -> list[Problem]:
    """Return the problems that `problems_to_jsonl` wrote."""
    return [Problem(row["question"], row["answer"], row.get("entry")) for row in from_jsonl(data)]

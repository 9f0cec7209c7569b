"""Users' files: problems as GSM8K writes them, preferences as HH-RLHF does."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from rlhf_core.data.jsonl import number_field, read_rows, text_fields
from rlhf_core.data.preferences import PreferencePair, split_transcripts
from rlhf_core.data.problems import Problem
from rlhf_core.errors import DataError
from rlhf_core.rewards.math_answers import FINAL_ANSWER, final_answer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

PROBLEM_FIELDS = ("question", "answer")
PREFERENCE_FIELDS = ("chosen", "rejected")

Form = Literal["problems", "preferences"]


@dataclass(frozen=True)
class PreferenceFile:
    """What a preference file holds, and what of it cannot be learnt from."""

    pairs: tuple[PreferencePair, ...]
    identical: int
    """Rows whose chosen and rejected responses are the same: dropped."""
    without_common_prompt: int
    """Rows whose transcripts part before an assistant's turn that both have: dropped."""

    def __iter__(self) -> Iterator[PreferencePair]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def dropped(self) -> str | None:
        """One sentence on the rows that were dropped; None if none was."""
        lost = self.identical + self.without_common_prompt
        if not lost:
            return None
        return (
            f"{lost} of {len(self.pairs) + lost} rows were dropped: {self.identical} with equal responses, "
            f"{self.without_common_prompt} without a common prompt"
        )


def detect_form(path: str | Path) -> Form:
    """Return which of the two forms a file has, by the fields of its first row.

    Raises:
        DataError: if it has neither, or the file cannot be read.
    """
    with closing(read_rows(path)) as rows:
        where, row = next(rows)
    if set(PREFERENCE_FIELDS) <= row.keys():
        return "preferences"
    if set(PROBLEM_FIELDS) <= row.keys():
        return "problems"
    raise DataError(
        f"{where} has neither 'question' and 'answer' (problems) nor 'chosen' and 'rejected' (preferences); "
        f"it has {', '.join(map(repr, row)) or 'no fields'}"
    )


def read_problems(path: str | Path) -> list[Problem]:
    """Return the problems of a file of {"question", "answer"} rows, in order, each prompt once (its first row).

    Where answers end in `#### 42`, as GSM8K's, the answer is what follows, without the commas of its
    thousands; the solution before it is not kept: the demonstration of a problem is its answer in the answer
    tags. Without `####` the whole text is the answer. A file that mixes the two is taken for a mistake.

    Args:
        path: JSON lines, also as gzip.

    Returns:
        At least one problem.

    Raises:
        DataError: as `read_rows`; or if a field is missing, of the wrong type or blank.
    """
    problems: dict[str, Problem] = {}
    marked: bool | None = None
    for where, row in read_rows(path):
        question, answer = text_fields(row, where, PROBLEM_FIELDS)
        if marked is None:
            marked = FINAL_ANSWER in answer
        if marked != (FINAL_ANSWER in answer):
            raise DataError(
                f"{where} {'lacks' if marked else 'has'} the mark {FINAL_ANSWER!r} before its final answer, unlike the "
                "rows before it; write all answers of a file in one way"
            )
        problem = Problem(question.strip(), stated_answer(answer, where))
        if not problem.prompt:
            raise DataError(f"{where}: field 'question' is blank")
        problems.setdefault(problem.key, problem)
    return list(problems.values())


def stated_answer(text: str, where: str) -> str:
    """Return the `final_answer` of a row.

    Raises:
        DataError: if nothing is left.
    """
    answer = final_answer(text)
    if not answer:
        place = f" after {FINAL_ANSWER!r}" if FINAL_ANSWER in text else ""
        raise DataError(f"{where}: field 'answer' holds no answer{place}")
    return answer


def read_preferences(path: str | Path) -> PreferenceFile:
    """Return the pairs of a file of {"chosen", "rejected"} rows, in order.

    Each is a transcript (HH-RLHF's), and what both share up to their last common assistant's turn is the
    prompt; or, with a third field "prompt", the response alone. A field "margin" says by how much the chosen
    response's score should exceed the other's.

    Args:
        path: JSON lines, also as gzip.

    Returns:
        At least one pair, and how many rows were dropped.

    Raises:
        DataError: as `read_rows`; if a field is missing or of the wrong type; if a transcript has no
            assistant's turn; or if no pair remains.
    """
    pairs: list[PreferencePair] = []
    identical = apart = 0
    for where, row in read_rows(path):
        pair = _pair(row, where)
        if pair is None:
            apart += 1
        elif pair.chosen.strip() == pair.rejected.strip():
            identical += 1
        else:
            pairs.append(pair)
    if not pairs:
        raise DataError(
            f"{path} holds no usable pair: {identical} rows have equal responses, {apart} have no common prompt"
        )
    return PreferenceFile(tuple(pairs), identical, apart)


def _pair(row: Mapping[str, Any], where: str) -> PreferencePair | None:
    margin = number_field(row, where, "margin", default=0.0)
    if "prompt" in row:
        prompt, chosen, rejected = text_fields(row, where, ("prompt", *PREFERENCE_FIELDS))
        return PreferencePair(prompt, chosen, rejected, margin)
    chosen, rejected = text_fields(row, where, PREFERENCE_FIELDS)
    pair = split_transcripts(chosen, rejected, where)
    return None if pair is None else replace(pair, margin=margin)

"""Texts that say what they should not: responses that repeat the prompt or speak for the user, prompts that answer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rlhf_core.data.linting.findings import Accused, quoted
from rlhf_core.data.linting.rows import normalised
from rlhf_core.data.transcripts import ASSISTANT, HUMAN, turns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlhf_core.data.linting.rows import LintRow, LintSet

_ECHOED_WORDS = 4
"""Words that a prompt must have, so that a response that begins with them is more than a courteous reply."""
_COPIED_WORDS = 8
"""Words of a response that a prompt does not hold by chance."""


def echo(given: LintSet) -> Iterator[Accused]:
    """Yield the rows of which a response begins with the user's whole last turn."""
    for place, row in enumerate(given.rows):
        asked = normalised(row.asked)
        if asked.count(" ") + 1 < _ECHOED_WORDS:
            continue
        for name, response in row.named_responses():
            begins = normalised(response[: 2 * len(row.asked) + 20])
            if begins == asked or begins.startswith(f"{asked} "):
                yield Accused(place, f"{name} begins with the prompt: {quoted(response)}")
                break


_SPEAKER = re.compile(
    r"(?:^|[\s.?!])(?:Human|Assistant)\s?:"
    r"|^[ \t]*(?:\#+\s*)?(?:User|USER|Bot|AI|Customer|HUMAN|ASSISTANT|System|SYSTEM)\s?:(?!//)"
    r"|\n\s*(?:Human|Assistant|User)\s*$",
    re.MULTILINE,
)


def speakers(given: LintSet) -> Iterator[Accused]:
    """Yield the rows of which a response, or the assistant's turn in a prompt, speaks for somebody else.

    Where transcripts part early, both responses go on with further turns as HH-RLHF writes them: these are meant.
    """
    for place, row in enumerate(given.rows):
        for name, text in _spoken(row):
            found = _SPEAKER.search(text)
            if found is not None:
                yield Accused(place, f"{name} holds the speaker {quoted(found[0])}: {quoted(text[found.start() :])}")
                break


def _spoken(row: LintRow) -> Iterator[tuple[str, str]]:
    goes_on = row.is_pair and all(HUMAN in response and ASSISTANT in response for response in row.responses)
    for name, response in row.named_responses():
        yield name, response.replace(HUMAN, "").replace(ASSISTANT, "") if goes_on else response
    for turn in turns(row.prompt) or ():
        if turn["role"] == "assistant":
            yield "a turn of the assistant in the prompt", str(turn["content"])[: len("Assistant: ")]


_VERDICT = re.compile(
    r"\[(?:chosen|rejected|preferred|better|worse)\]"
    r"|\b(?:chosen|rejected|preferred|better|correct|reference|expected)"
    r" (?:response|answer|completion|output)\s*(?:is\b|:)",
    re.IGNORECASE,
)
_OF_VERDICTS = ("response", "answer", "completion", "output", "[")
"""One of them is in every text that the pattern fits."""
_KEY = r"(?:\b(?:answer|solution|result|key|label|truth)\b\s*(?:is|was|=|:)+\s*|\#{4}\s*|\\boxed\{\s*)"

_FIRST_WORDS = re.compile(r"[^\W_]+(?: [^\W_]+)?")


def answer(given: LintSet) -> Iterator[Accused]:
    """Yield the rows whose prompt holds the answer, or says which response is the better one."""
    for place, row in enumerate(given.rows):
        told = _told_answer(row)
        if told is not None:
            yield Accused(place, f"the prompt says {quoted(told)}")


def _told_answer(row: LintRow) -> str | None:
    if row.answer is not None:
        found = re.search(rf"{_KEY}{re.escape(row.answer.strip())}(?![\w])", row.prompt, re.IGNORECASE)
        return None if found is None else found[0]
    if not row.responses:
        return None
    folded = row.prompt.casefold()
    found = _VERDICT.search(row.prompt) if any(word in folded for word in _OF_VERDICTS) else None
    if found is not None:
        return row.prompt[found.start() :]
    response = row.responses[0]
    begins = _FIRST_WORDS.search(response)
    if begins is None or begins[0].casefold() not in folded:  # spares most rows the rest
        return None
    said = normalised(response)
    return response if said.count(" ") + 1 >= _COPIED_WORDS and said in normalised(row.prompt) else None

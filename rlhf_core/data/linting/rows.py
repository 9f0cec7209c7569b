"""What the rules look at: the texts of a row, whatever its role, and the same text in its plainest form."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

import xxhash

from rlhf_core.data.preferences import PreferencePair
from rlhf_core.data.problems import problem_key
from rlhf_core.data.transcripts import turns_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rlhf_core.data.preparing.lengths import TokenMeter
    from rlhf_core.data.problems import Problem
    from rlhf_core.data.reading import ReadSet

_QUOTES = str.maketrans(dict.fromkeys("‘’‛", "'") | dict.fromkeys("“”„«»", '"'))
_AROUND_WORDS = ".,!?;:'\"…()[]*_"
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\d+|[^\W\d_\u3040-\u30ff\u3400-\u9fff]+")
"""A word, a number, or one character of a script that puts no space between words."""


def normalised(text: str) -> str:
    """Return a text without what does not change its meaning: case, spaces, and punctuation around words.

    Signs within and before numbers stay.

    Example:
        >>> normalised("You’re  WELCOME!"), normalised("x = -1.5.")
        ("you're welcome", 'x = -1.5')
    """
    if not text.isascii():
        text = normalize("NFKC", text).translate(_QUOTES)
    words = " ".join([word.strip(_AROUND_WORDS) for word in text.casefold().split()])
    return " ".join(words.split()) or text.strip()  # what was punctuation alone has left a space too much


def words_of(text: str) -> list[str]:
    """Return the words and numbers of a text, in lower case."""
    return _WORD.findall(text.casefold())


@dataclass(frozen=True)
class LintRow:
    """The texts of a row."""

    where: str
    """Names it, such as "row 3 of pairs.jsonl"."""
    prompt: str
    responses: tuple[str, ...]
    """Chosen and rejected, or what is demonstrated; none for a problem or a prompt."""
    answer: str | None = None
    annotator: str | None = None

    @cached_property
    def asked(self) -> str:
        """The user's last turn; the whole prompt where it is no transcript."""
        return next((str(turn["content"]) for turn in reversed(turns_of(self.prompt)) if turn["role"] == "user"), "")

    @property
    def key(self) -> str:
        """Names the prompt as the splits do."""
        return problem_key(self.prompt)

    @cached_property
    def prompt_id(self) -> int:
        """The same for prompts that differ in nothing that matters."""
        return _id(self.prompt)

    @cached_property
    def response_ids(self) -> tuple[int, ...]:
        """The same for responses that differ in nothing that matters."""
        return tuple(map(_id, self.responses))

    @property
    def is_pair(self) -> bool:
        """Whether it has a chosen and a rejected response."""
        return len(self.responses) == len(SIDES)

    def named_responses(self) -> Iterable[tuple[str, str]]:
        """Yield the responses with what they are called."""
        return zip(SIDES if self.is_pair else ("response",), self.responses, strict=False)

    def texts(self) -> Iterable[tuple[str, str]]:
        """Yield all texts that a model may see, with what they are called."""
        yield "prompt", self.prompt
        yield from self.named_responses()


SIDES = ("chosen", "rejected")


def _id(text: str) -> int:
    return xxhash.xxh3_64_intdigest(normalised(text).encode("utf-8", "surrogatepass"))


@dataclass(frozen=True)
class LintSet:
    """The rows of one set."""

    role: str
    rows: tuple[LintRow, ...]
    misspelt: tuple[tuple[str, str], ...] = ()
    """Columns that nothing is read from, each with the field of ours that it seems to be meant for."""
    meter: TokenMeter | None = None
    """Counts tokens as the model does; None where no model is at hand."""
    max_length: int | None = None
    """Tokens of a prompt with a response that the stage of pairs reads; None does not look where it stops."""
    earlier: tuple[LintRow, ...] = ()
    """Rows that were learnt before, for rules that compare; those that stand in the set, too, repeat nothing."""

    @classmethod
    def of(
        cls,
        role: str,
        read: ReadSet[Any],
        meter: TokenMeter | None = None,
        max_length: int | None = None,
        earlier: Mapping[str, Sequence[Any]] | None = None,
    ) -> LintSet:
        """Return a set as the reader handed it on, and rows that were learnt before, by where they are."""
        names = [origin.where for origin in read.origins] or [f"row {n}" for n, _ in enumerate(read.rows, start=1)]
        annotators = [origin.annotator for origin in read.origins] or [None] * len(read.rows)
        rows = tuple(_row(*each) for each in zip(read.rows, names, annotators, strict=True))
        before = tuple(
            _row(row, f"row {number} of {where}", None)
            for where, each in (earlier or {}).items()
            for number, row in enumerate(each, start=1)
        )
        return cls(role, rows, read.misspelt, meter, max_length, before)


def _row(row: PreferencePair | Problem, where: str, annotator: str | None) -> LintRow:
    if isinstance(row, PreferencePair):
        return LintRow(where, row.prompt, (row.chosen, row.rejected), None, annotator)
    shown = () if row.demonstration is None else (row.demonstration,)
    return LintRow(where, row.prompt, shown, row.answer, annotator)

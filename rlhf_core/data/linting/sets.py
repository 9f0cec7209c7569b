"""What is wrong with a set as a whole: it pays for length, or much of it comes from one hand."""

from __future__ import annotations

import re
from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

from rlhf_core.counting import counted
from rlhf_core.data.linting.findings import quoted
from rlhf_core.data.linting.rows import normalised
from rlhf_core.gating import sign_test

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlhf_core.data.linting.rows import LintSet

BIASED, SURE = 0.05, 0.001
"""From 0.5, how far the share of pairs whose longer response is chosen may be, and the p-value that shows it."""


def length_bias(given: LintSet) -> Iterator[str]:
    """Say that the longer response is preferred too often or too seldom, by an exact sign test."""
    lengths = [tuple(map(len, row.responses)) for row in given.rows if row.is_pair]
    unequal = [(chosen, rejected) for chosen, rejected in lengths if chosen != rejected]
    if not unequal:
        return
    longer = sum(chosen > rejected for chosen, rejected in unequal)
    share, p = longer / len(unequal), two_sided(longer, len(unequal))
    if abs(share - 0.5) < BIASED or p >= SURE:
        return
    ratio = median(chosen / rejected for chosen, rejected in unequal if rejected)
    yield (
        f"the longer response of data.{given.role} is chosen in {share:.1%} of {counted(len(unequal), 'pair')} "
        f"(exact sign test: p = {p:.1g}); the median of chosen to rejected length is {ratio:.2f}"
    )


def two_sided(successes: int, trials: int) -> float:
    """Return the two-sided p-value of a count, if each of the trials were a fair coin.

    Example:
        >>> two_sided(0, 4), two_sided(2, 4)
        (0.125, 1.0)
    """
    return min(1.0, 2 * sign_test(max(successes, trials - successes), min(successes, trials - successes)))


FLOOD_ROWS, FLOOD_SHARE = 20, 0.01
"""A flood has so many rows, and such a share of the set."""
ANNOTATORS_SHARE, FLOOD_TIMES = 0.005, 5
"""An annotator's flood has such a share, and so many times what is usual among annotators."""
_HALF, _FORM = 0.5, 0.9
_PATTERN_WORDS = 6
_NUMBER = re.compile(r"\d+")
_MOST_TOLD = 5


def flood(given: LintSet) -> Iterator[str]:
    """Say that one annotator, one pattern of prompts or one response makes up much of a set."""
    yield from _of_annotators(given)
    yield from _of_patterns(given)
    yield from _of_responses(given)


def _of_annotators(given: LintSet) -> Iterator[str]:
    counts = Counter(row.annotator for row in given.rows if row.annotator is not None)
    if len(counts) < 3:  # noqa: PLR2004 - of two, one has half
        return
    usual = median(counts.values())
    for name, count in counts.most_common(_MOST_TOLD):
        much = count > _HALF * counts.total() or count >= FLOOD_TIMES * usual
        if much and _is_flood(count, len(given.rows), ANNOTATORS_SHARE):
            yield (
                f"annotator {quoted(name)} made {count:,} of {len(given.rows):,} rows of data.{given.role}; the median "
                f"of {len(counts):,} annotators made {usual:g}"
            )


def _of_patterns(given: LintSet) -> Iterator[str]:
    begun = Counter(pattern for row in given.rows if (pattern := _pattern(row.asked)) is not None)
    for words, count in begun.most_common(_MOST_TOLD):
        # where nearly all prompts begin alike, that is the form of the set
        if _is_flood(count, len(given.rows)) and count < _FORM * len(given.rows):
            yield f"{count:,} of {len(given.rows):,} prompts of data.{given.role} begin with {quoted(words)}"


def _pattern(asked: str) -> str | None:
    words = _NUMBER.sub("0", normalised(asked[:200])).split()
    return " ".join(words[:_PATTERN_WORDS]) if len(words) > _PATTERN_WORDS else None


def _of_responses(given: LintSet) -> Iterator[str]:
    firsts: dict[int, str] = {}
    said: Counter[int] = Counter()
    for row in given.rows:
        if row.responses and row.responses[0].count(" ") + 1 >= _PATTERN_WORDS:
            said[row.response_ids[0]] += 1
            firsts.setdefault(row.response_ids[0], row.responses[0])
    for each, count in said.most_common(_MOST_TOLD):
        if _is_flood(count, len(given.rows)):
            yield f"{count:,} of {len(given.rows):,} rows of data.{given.role} have the response {quoted(firsts[each])}"


def _is_flood(count: int, rows: int, share: float = FLOOD_SHARE) -> bool:
    return count >= FLOOD_ROWS and count >= share * rows


def columns(given: LintSet) -> Iterator[str]:
    """Say that a column that nothing is read from is called nearly as one of ours."""
    for theirs, ours in given.misspelt:
        yield f"column {quoted(theirs)} of data.{given.role} is not read; did you mean {ours!r}?"

"""All rules, in the order in which they are told: what each finds, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rlhf_core.data.linting import endings, languages, leaks, marks, pairs, repeats, sets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rlhf_core.data.linting.findings import Accused
    from rlhf_core.data.linting.rows import LintSet


class RowRule(NamedTuple):
    """Accuses rows one by one."""

    name: str
    says: str
    """What its rows do, to stand behind their number."""
    advice: str
    find: Callable[[LintSet], Iterable[Accused]]


class SetRule(NamedTuple):
    """Judges a set as a whole."""

    name: str
    advice: str
    find: Callable[[LintSet], Iterable[str]]


OVERLAP = "overlap"
ROW_RULES = (
    RowRule(
        "equal",
        "have two responses that say the same",
        "leave them out: there is nothing to prefer",
        pairs.equal,
    ),
    RowRule(
        "contradictory",
        "contradict each other",
        "let one judgement stand, or leave all of them out",
        pairs.contradictory,
    ),
    RowRule(
        "repeated",
        "say nearly what an earlier row says",
        "leave them out, or learn them more often than the others knowingly",
        repeats.repeated,
    ),
    RowRule("echo", "have a response that repeats the prompt", "cut the prompt off the responses", leaks.echo),
    RowRule(
        "speakers",
        "hold a response in which somebody else speaks",
        "end each response where the next speaker begins, and take the speakers' names off",
        leaks.speakers,
    ),
    RowRule("answer", "have the answer in the prompt", "take it out of the prompts", leaks.answer),
    RowRule(
        "language",
        "are in another language than the set",
        "leave them out, unless the model is to speak it",
        languages.language,
    ),
    RowRule(
        "template",
        "hold the marks of a chat template",
        "write the texts without them: the model's own template adds its marks",
        marks.template,
    ),
    RowRule(
        "markup",
        "hold markup that acts, or characters that are not seen",
        "leave them out, or clean the texts",
        marks.markup,
    ),
    RowRule("encoding", "were decoded wrongly", "read the origin as UTF-8 and write the set again", marks.encoding),
    RowRule(
        "cut",
        "have a response that stops in mid-sentence",
        "leave them out, or sample them again with more tokens",
        endings.cut,
    ),
    RowRule("empty", "have a response without words", "leave them out", endings.empty),
)
SET_RULES = (
    SetRule(
        "length_bias",
        "balance the set, or compare responses of like length; else length is what is learnt",
        sets.length_bias,
    ),
    SetRule("flood", "take fewer of these rows, so that others count as well", sets.flood),
    SetRule("columns", "rename the column, or map it in the source's `columns`", sets.columns),
)

"""What coati's two functions make of answers on which a careful grader has decided before: `math_verdicts.tsv`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from rlhf_core.rewards.competition import math_competition_score
from rlhf_core.rewards.math_answers import gsm8k_score
from rlhf_core.rewards.notation import LONGEST, plain

TABLE = Path(__file__).with_name("math_verdicts.tsv")
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "judges.md"
HIDDEN, REPEATED = re.compile(r"<U\+([0-9A-F]{4})>"), re.compile(r"<(.+?) x (\d+)>")
NUMBERS = {"integer", "sign", "thousands", "decimal", "scientific", "percent", "fraction", "mixed"}
MOST_REFUSED = 0.05
"""Share of the right answers that the function for competitions may refuse."""

NOT_COMPUTED = {  # what math-verify is not asked, since it may take for ever or be read in two ways
    ("6", "\\sum_{n=1}^{3} n"), ("\\frac{1}{2}", "\\int_0^1 x\\,dx"), ("\\frac{1}{2}", "\\cos 60^\\circ"),
    ("2", "42 \\bmod 5"), ("10", "{5 \\choose 2}"), ("(n+1)!", "(n+1) \\cdot n!"), ("\\frac{1}{3}", "0.(3)"),
}  # fmt: skip
NOT_CONVERTED = {  # two units are two answers, even if the quantities are equal
    ("5 hours", "300 minutes"), ("1 m", "100 cm"), ("$0.50", "50 cents"), ("$5.20", "5 dollars and 20 cents"),
    ("5 pounds", "5 lb"), ("5 million dollars", "$5 million"),
}  # fmt: skip
NOT_SOLVED = {("-1<x<1", "|x|<1"), ("(1,\\infty)", "\\{x \\mid x > 1\\}"), ("(x,y)=(1,2)", "x=1, y=2")}
LETTERS = {
    ("xy", "yx"),
    ("A", "Option A"),
    ("\\text{ellipse}", "an ellipse"),
}  # letters alone may be a word, as "no" and "on" are
KNOWN_REFUSALS = NOT_COMPUTED | NOT_CONVERTED | NOT_SOLVED | LETTERS

NOT_ONE_NUMBER = {  # the function for GSM8K reads one number and computes nothing
    ("42", "40+2"), ("42", "42+0"), ("42", "6 \\cdot 7"), ("42", "6 \\times 7"), ("5", "-(-5)"), ("2e", "e+e"),
    ("\\frac{1}{2}", "(1)/(2)"), ("-0.5", "-(1/2)"), ("\\pm 5", "5, -5"), ("5, -5", "\\pm 5"), ("1200", "x = 1,200"),
    ("(1, 200)", "(1,200)"), ("\\{1, 200\\}", "\\{1,200\\}"), ("10,000, 20,000", "20000, 10000"),
    ("\\frac{1}{3}", "0.(3)"), ("0", "x-x"), ("42", "\\sqrt{1764}"), ("42", "42 \\cdot 1^{1000}"),
    ("\\frac{1}{2}", "\\frac12 = 0.5"),
}  # fmt: skip


class Row(NamedTuple):
    kind: str
    right: bool
    reference: str
    given: str

    @property
    def pair(self) -> tuple[str, str]:
        return self.reference, self.given


def rows() -> list[Row]:
    lines = [line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    assert {line[1] for line in lines} == {"right", "wrong"}
    return [Row(line[0], line[1] == "right", line[2], line[3]) for line in lines]


def spelt(text: str) -> str:
    """The text with its hidden signs and repetitions written out."""
    text = REPEATED.sub(lambda match: match[1] * int(match[2]), text)
    return HIDDEN.sub(lambda match: chr(int(match[1], 16)), text)


@cache
def paid(score: Callable[..., float]) -> frozenset[tuple[str, str]]:
    responses = {row.pair: f"<think></think><answer>{spelt(row.given)}</answer>" for row in rows()}
    return frozenset(pair for pair, text in responses.items() if score("", text, spelt(pair[0])) == 10.0)


class Shares(NamedTuple):
    """Of a kind, how many answers are right and how many wrong; the shares refused of these, and paid of those."""

    right: int
    refused: float
    wrong: int
    paid: float


def shares(score: Callable[..., float]) -> dict[str, Shares]:
    """Where the judge disagrees with the grader, by kind."""
    table, found = rows(), {}
    for kind in [*dict.fromkeys(row.kind for row in table), "all"]:
        counts = Counter((row.right, row.pair in paid(score)) for row in table if kind in {row.kind, "all"})
        right, wrong = (counts[verdict, True] + counts[verdict, False] for verdict in (True, False))
        found[kind] = Shares(
            right, 100 * counts[True, False] / max(right, 1), wrong, 100 * counts[False, True] / max(wrong, 1)
        )
    return found


def test_the_table_is_large_and_says_everything_once() -> None:
    table = rows()
    assert len(table) >= 1000
    assert len({row.pair for row in table}) == len(table)
    for known in (KNOWN_REFUSALS, NOT_ONE_NUMBER):
        assert known <= {row.pair for row in table if row.right}


@pytest.mark.parametrize("score", [gsm8k_score, math_competition_score])
def test_no_wrong_answer_is_paid(score: Callable[..., float]) -> None:
    assert [row for row in rows() if not row.right and row.pair in paid(score)] == []


def test_right_answers_are_paid_but_for_a_few_that_are_known() -> None:
    right = {row.pair for row in rows() if row.right}
    assert right - paid(math_competition_score) == KNOWN_REFUSALS
    assert len(KNOWN_REFUSALS) / len(right) <= MOST_REFUSED


def test_numbers_are_paid_by_the_function_for_gsm8k_in_any_notation() -> None:
    right = {row.pair for row in rows() if row.right and row.kind in NUMBERS}
    assert right - paid(gsm8k_score) == NOT_ONE_NUMBER


def test_the_shares_of_disagreement_are_those_of_the_document() -> None:
    found = shares(math_competition_score)
    print(*found.items(), sep="\n")  # noqa: T201  # for `pytest -s`
    said = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    every = found.pop("all")
    assert f"Of {every.right} right answers {every.refused:.1f} % are refused" in said
    assert f"of {every.wrong} wrong ones {every.paid:.1f} % are paid" in said
    often = {kind: each for kind, each in found.items() if each.refused > 4}
    assert len(often) == len(re.findall(r" % of \d+\)", said))
    assert all(f"{kind} ({each.refused:.1f} % of {each.right})" in said for kind, each in often.items())


def test_a_text_in_the_one_notation_stays_as_it_is() -> None:
    texts = {plain(spelt(text)) for row in rows() for text in row.pair}
    assert {text: plain(text) for text in texts if len(text) <= LONGEST and plain(text) != text} == {}

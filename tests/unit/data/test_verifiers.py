"""A response is right if the whole of it is the answer in its tags."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.data import verify


def judge(response: str, answer: str = "61 58 50", *, ended: bool = True) -> tuple[float, bool]:
    verdict = verify(response, answer, ended=ended, tag="answer")
    assert verdict.failure is None
    return verdict.score, verdict.well_formed


def tagged(text: str) -> str:
    return f"<answer>{text}</answer>"


@pytest.mark.parametrize(
    "response",
    ["<answer>61 58 50</answer>", " \n<answer> 61,  58,50\n</answer> ", "<answer>61.0 58 050</answer>"],
)
def test_right_answers_score_one(response: str) -> None:
    assert judge(response) == (1.0, True)


@pytest.mark.parametrize("text", ["61 50 58", "61 58", "61 58 50 50", "615850", "", "61-58-50", "sixty-one 58 50"])
def test_wrong_answers_in_the_right_form_score_zero(text: str) -> None:
    assert judge(tagged(text)) == (0.0, True)


@pytest.mark.parametrize(
    "response",
    [
        "61 58 50",
        "<answer>61 58 50",
        "61 58 50</answer>",
        "The answer: <answer>61 58 50</answer>",
        "<answer>61 58 50</answer> I hope this helps",
        "<answer>61 58 50</answer><answer>61 58 50</answer>",
        "<answer><answer>61 58 50</answer></answer>",
        "<Answer>61 58 50</Answer>",
        "<answer>",
        "</answer>",
        "",
    ],
)
def test_anything_else_is_ill_formed_and_scores_zero(response: str) -> None:
    assert judge(response) == (0.0, False)


def test_a_response_that_was_cut_off_is_ill_formed() -> None:
    assert judge(tagged("61 58 50"), ended=False) == (0.0, False)


@pytest.mark.parametrize(("response", "answer"), [
    ("1,000", "1000"), ("1000", "1,000"), ("1000.0", "1,000"), ("+5", "5"), ("-0", "0"), (".5", "0.50"), ("18.", "18"),
    ("1,234,567", "1234567"), ("100,200", "100 200"), ("a, b", "a b"),
    ("\u22125", "-5"), ("-5", "\u22125"), ("1 \u22122", "1 -2"),
])  # fmt: skip
def test_numbers_are_compared_by_value_and_commas_by_either_reading(response: str, answer: str) -> None:
    assert judge(tagged(response), answer) == (1.0, True)


@pytest.mark.parametrize(("response", "answer"), [
    ("1,00", "100"), ("1000.5", "1000"), ("-5", "5"), ("1e3", "1000"), ("True", "true"), ("12,34", "1234"),
    ("\u0665", "5"), ("\u22125", "5"), ("- 5", "-5"), ("NaN", "0"), ("1_000", "1000"),
])  # fmt: skip
def test_what_only_looks_alike_is_wrong(response: str, answer: str) -> None:
    assert judge(tagged(response), answer) == (0.0, True)


@given(st.text(), st.text(), st.booleans())
def test_no_text_can_take_the_verifier_down(response: str, answer: str, ended: bool) -> None:
    for text in (response, tagged(response)):
        score, _ = judge(text, answer, ended=ended)
        assert score in (0.0, 1.0)


def test_a_very_long_number_is_compared_too() -> None:
    assert judge(tagged("9" * 20_000), "9" * 20_000) == (1.0, True)
    assert judge(tagged("1," * 20_000), "1") == (0.0, True)

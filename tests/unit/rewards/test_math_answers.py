"""coati's two functions: 0 without the form, 1 for it, 10 for the right answer; what upstream misjudged is judged."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from rlhf_core.rewards import gsm8k_reward_fn, math_competition_reward_fn
from rlhf_core.rewards.competition import math_competition_score
from rlhf_core.rewards.math_answers import gsm8k_score
from rlhf_core.rewards.structure import answer_tags
from tests.tiny_llama import tiny_tokenizer

BOTH = pytest.mark.parametrize("score", [gsm8k_score, math_competition_score])
BOTH_PUBLIC = pytest.mark.parametrize("function", [gsm8k_reward_fn, math_competition_reward_fn])


def response(answer: str) -> str:
    return f"<think>let me see</think><answer>{answer}</answer>"


@BOTH
@pytest.mark.parametrize(("given", "reference"), [
    ("42", "42"), ("42", "6 * 7 = 42\n#### 42"), ("1,000", "1000"), ("1000", "#### 1,000"), ("18.0", "18"),
    ("$5", "5"), ("5", "$5"), ("18.", "18"), (" 18 ", "18"), ("-3", "-3"), ("+3", "3"), (".5", "0.50"),
    ("\\frac{1}{2}", "0.5"), ("1/2", "\\frac{1}{2}"), ("\\dfrac{-3}{4}", "-0.75"), ("50", "50%"), ("$18$", "18"),
    ("50%", "0.5"), ("0.5", "50%"), ("0.5%", "0.5%"), ("(1,2)", "#### (1,2)"), ("1000", "#### $1,000"),
    ("18.50.", "18.5"), ("(1,200)", "#### (1,200)"), ("100%", "1"), ("1", "1%"), ("150%", "1.5"), ("-1.5", "-150%"),
])  # fmt: skip
def test_equal_numbers_are_right(score: Callable[..., float], given: str, reference: str) -> None:
    assert score("", response(given), reference) == 10.0


@BOTH
@pytest.mark.parametrize(("given", "reference"), [
    ("43", "42"), ("", "42"), ("1,00", "100"), ("-5", "5"), ("180", "18"), ("1/0", "1"), ("NaN", "0"),
    ("forty-two", "42"), ("41 or 42", "42"), ("9" * 5000, "42"), ("0.5%", "0.5"), ("3 1/2", "31/2"), ("1 2", "12"),
    ("12", "#### (1,2)"), ("(1200)", "#### (1,200)"), ("1200", "#### (1,200)"), ("50%", "5"), ("0.5", "0.5%"),
    ("50%", "50"), ("1%", "1"), ("~42", "42"),
])  # fmt: skip
def test_other_numbers_have_the_form_alone(score: Callable[..., float], given: str, reference: str) -> None:
    assert score("", response(given), reference) == 1.0


@BOTH
def test_without_the_form_or_a_reference_there_is_nothing(score: Callable[..., float]) -> None:
    assert score("", "42", "42") == 0.0
    assert score("", response("42") + " I hope this helps", "42") == 0.0
    assert score("", response("42"), None) == 0.0
    assert score("", response(""), "") == score("", response(""), "#### ") == 0.0


@BOTH
def test_white_space_at_the_end_is_forgiven_and_configured_tags_hold_for_form_and_answer(
    score: Callable[..., float],
) -> None:
    assert score("", response("42") + "\n \n", "42") == 10.0
    tags = answer_tags("result")
    assert score("", "<result>42</result>", "42", tags=tags) == 10.0
    assert score("", "<result>41</result>", "42", tags=tags) == 1.0
    assert score("", response("42"), "42", tags=tags) == 0.0


@pytest.mark.parametrize(("given", "reference", "right"), [
    ("(x+1)^2", "x^2+2x+1", True), ("x^2+1", "x^2+2x+1", False), ("\\{2, 1\\}", "\\{1, 2\\}", True),
    ("(2,1)", "(1,2)", False), ("2^{1/2}", "\\sqrt{2}", True), ("x=5", "5", True), ("$\\frac{1}{2}x$", "0.5x", True),
    ("\\frac 1 2", "\\frac{1}{2}", True), ("\\frac{1}{2} x", "\\frac 1 2 x", True), ("\\frac 10 2", "5", False),
    ("x = 1 2", "x=12", False), ("Evelyn", "\\text{Evelyn}", True), ("\\frac{", "x", False), ("", "x", False),
])  # fmt: skip
def test_math_verify_stands_behind_the_competitions_function(given: str, reference: str, right: bool) -> None:
    assert math_competition_score("", response(given), reference) == (10.0 if right else 1.0)


def encoded(
    text: str, *, left: int = 3, right: int = 2, end: bool = True
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Prompt padded left, response with its stop token padded right: ids, mask, and where the response lies."""
    tokenizer = tiny_tokenizer()
    prompt, said = tokenizer("Q:").input_ids, tokenizer(text).input_ids + [tokenizer.eos_token_id] * end
    pad = tokenizer.pad_token_id
    ids = torch.tensor([pad] * left + prompt + said + [pad] * right)
    mask = torch.tensor([0] * left + [1] * len(prompt + said) + [0] * right)
    start = left + len(prompt)
    return ids, mask, start, start + len(said) - 1


@BOTH_PUBLIC
@pytest.mark.parametrize("past", [0, 1])
@pytest.mark.parametrize("end", [True, False])
def test_both_functions_read_the_same_response_whichever_way_its_end_is_told(
    function: Callable[..., torch.Tensor], past: int, end: bool
) -> None:
    ids, mask, start, last = encoded(response("42"), end=end)
    found = function(
        ids, mask, response_start=start, response_end=last + past, gt_answer="42", tokenizer=tiny_tokenizer(), other=1
    )
    assert isinstance(found, torch.Tensor)
    assert found.item() == 10.0


@BOTH_PUBLIC
@pytest.mark.parametrize("stop", [None, "<|im_end|>", "</answer>"])
def test_a_tag_that_is_a_special_token_is_read_even_where_generation_stops_at_it(
    function: Callable[..., torch.Tensor], stop: str | None
) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<answer>", "</answer>"]})
    ids = torch.tensor([*tokenizer(response("42")).input_ids, tokenizer.eos_token_id, tokenizer.pad_token_id])
    more = {} if stop is None else {"stop_ids": [tokenizer.convert_tokens_to_ids(stop)]}
    place = {"response_start": 0, "response_end": len(ids) - 1}
    found = function(ids, torch.ones_like(ids), gt_answer="42", tokenizer=tokenizer, **place, **more)
    assert found.item() == 10.0


@BOTH_PUBLIC
def test_the_prompt_is_not_the_response(function: Callable[..., torch.Tensor]) -> None:
    ids, mask, start, last = encoded("42")
    ids = torch.cat([torch.tensor(tiny_tokenizer()(response("42")).input_ids), ids])
    more = len(ids) - len(mask)
    mask = torch.cat([torch.ones(more, dtype=mask.dtype), mask])
    found = function(
        ids, mask, response_start=start + more, response_end=last + more, gt_answer="42", tokenizer=tiny_tokenizer()
    )
    assert found.item() == 0.0

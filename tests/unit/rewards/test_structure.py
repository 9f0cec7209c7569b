"""The form of a response is counted tag by tag."""

from __future__ import annotations

import pytest

from rlhf_core.errors import ConfigError
from rlhf_core.rewards.structure import answer_tags, check_tags, extract_answer, validate_response_structure

RIGHT = "<think>1 + 1</think>\n<answer>2</answer>"
CHINESE = {
    "think_start": {"text": "<|思考|>", "num_occur": 2},
    "answer_start": {"text": "[[", "num_occur": 1},
    "answer_end": {"text": "]]", "num_occur": 1},
}


@pytest.mark.parametrize("text", [RIGHT, RIGHT + " \n\t", "Well: " + RIGHT, "<think></think><answer></answer>"])
def test_each_tag_once_and_in_order_is_the_form(text: str) -> None:
    assert validate_response_structure(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2",
        "<answer>2</answer>",
        RIGHT + RIGHT,
        RIGHT + "<answer>",
        RIGHT + ".",
        "<answer>2</answer><think>1 + 1</think>",
        "</think><think><answer>2</answer>",
        "<think>1 + 1</think><Answer>2</Answer>",
        "<think>1 + 1<answer>2</answer></think>",
    ],
)
def test_a_tag_too_few_too_many_or_out_of_order_is_not(text: str) -> None:
    assert not validate_response_structure(text)


def test_configured_tags_and_counts_are_what_is_looked_for() -> None:
    right = "<|思考|>a<|思考|> [[ 7 ]] "
    assert validate_response_structure(right, CHINESE)
    assert extract_answer(right, CHINESE) == "7"
    assert not validate_response_structure(right.replace("<|思考|>", "", 1), CHINESE)
    assert not validate_response_structure(RIGHT, CHINESE)
    forbidden = {"think_start": {"text": "<think>", "num_occur": 0}, **answer_tags("answer")}
    assert validate_response_structure("<answer>2</answer>", forbidden)
    assert not validate_response_structure(RIGHT, forbidden)


def test_tags_that_occur_more_than_once_come_in_pairs() -> None:
    twice = {"think_start": {"text": "<t>", "num_occur": 2}, "think_end": {"text": "</t>", "num_occur": 2}}
    tags = {**twice, **answer_tags("a")}
    assert validate_response_structure("<t>1</t> <t>2</t> <a>3</a>", tags)
    assert not validate_response_structure("<t>1<t>2</t></t> <a>3</a>", tags)
    assert not validate_response_structure("<t>1</t> </t>2<t> <a>3</a>", tags)


def test_an_answer_is_what_stands_in_the_last_pair_of_tags() -> None:
    assert extract_answer(RIGHT) == "2"
    assert extract_answer("<answer> 1 </answer> <answer>\n2 </answer>") == "2"
    assert extract_answer("<answer>2") is None
    assert extract_answer("2</answer>") is None


@pytest.mark.parametrize(
    "tags", [{}, [], None, {"answer_start": {"text": "<a>"}}, {**answer_tags("a"), "x": {"text": ""}},
             {**answer_tags("a"), "x": {"text": "y", "num_occur": -1}}],
)  # fmt: skip
def test_tags_of_another_form_are_refused(tags: object) -> None:
    with pytest.raises(ConfigError, match="answer_start and answer_end"):
        check_tags(tags)

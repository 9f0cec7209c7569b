"""A problem may lack its answer, its record and its demonstration; each survives being written down."""

from __future__ import annotations

import re

import pytest

from rlhf_core.config import TemplateConfig
from rlhf_core.data import Problem, PromptTemplate, problems_from_jsonl, problems_to_jsonl
from rlhf_core.data.problems import problem_key, response_to_learn
from rlhf_core.errors import DataError
from tests.tiny_llama import tiny_tokenizer


@pytest.fixture(scope="module")
def template() -> PromptTemplate:
    return PromptTemplate(tiny_tokenizer(), TemplateConfig(prompt="{prompt}\n"))


def test_problems_survive_being_written_down() -> None:
    problems = [
        Problem("Wie viel?\n", "größer \u2028 42"),
        Problem("open"),
        Problem("1+1", "2", '{"a": 1}', "Two: <answer>2</answer>"),
        Problem("\n\nHuman: Hi\n\nAssistant:", demonstration=""),
    ]
    back = problems_from_jsonl(problems_to_jsonl(problems))
    assert [(each.prompt, each.answer, each.entry, each.demonstration) for each in back] == [
        (each.prompt, each.answer, each.entry, each.demonstration) for each in problems
    ]


def test_a_whole_demonstration_is_learnt_where_there_is_one(template: PromptTemplate) -> None:
    assert response_to_learn(Problem("1+1", "2"), template) == "<answer>2</answer>"
    assert response_to_learn(Problem("1+1", "2", demonstration="Two."), template) == "Two."


def test_an_open_prompt_has_nothing_to_learn(template: PromptTemplate) -> None:
    with pytest.raises(DataError, match=r"'Tell me a joke' has neither .* data\.demonstrations"):
        response_to_learn(Problem("Tell me a joke"), template)


def test_a_transcript_of_one_turn_is_the_same_prompt_as_that_turn() -> None:
    assert Problem("Tell me a joke").key == Problem("\n\nHuman: Tell me a joke\n\nAssistant:").key
    assert Problem("Hi").key != Problem("\n\nSystem: Be brief.\n\nHuman: Hi\n\nAssistant:").key


def test_a_key_ignores_case_and_white_space_alone() -> None:
    assert problem_key("  Sort\tTHIS:\n1 ") == problem_key("sort this: 1")
    assert problem_key("sort this: 1") != problem_key("sort this: 2")
    assert re.fullmatch(r"[0-9a-f]{16}", problem_key("x"))

"""Suites beside the task: the packaged questions, functions of the user's own, and what is refused before a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from rlhf_core.config import ForgettingConfig
from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.forgetting.measures import Measure
from rlhf_core.forgetting.suites import (
    Question,
    answer_questions,
    check_suites,
    measure,
    packaged_questions,
    suite_facts,
)
from tests.tiny_llama import tiny_llama, tiny_tokenizer


@pytest.fixture
def mine() -> Iterator[ModuleType]:
    """Yield a module of a user's, in which suites may be defined."""
    module = sys.modules["my_suites"] = ModuleType("my_suites")
    yield module
    del sys.modules["my_suites"]


def measured(*suites: str, passages: int = 0, allowed: tuple[str, ...] = ("my_suites",)) -> list[Measure]:
    config = ForgettingConfig(passages=passages, suites=suites)
    model, tokenizer = tiny_llama(initializer_range=0.3), tiny_tokenizer()
    return measure(model, tokenizer, config, dtype=torch.float32, allowed_modules=allowed)


def test_the_option_with_the_highest_mean_log_probability_is_the_answer() -> None:
    model, tokenizer = tiny_llama(initializer_range=0.5), tiny_tokenizer()
    options = ["red", "a much longer option", "b", "40 metres"]

    def mean(option: str) -> float:
        asked = tokenizer("Question: Which?\nAnswer:")["input_ids"]
        said = tokenizer(f" {option}")["input_ids"]
        with torch.no_grad():
            logprobs = model(torch.tensor([[*asked, *said]])).logits[0].log_softmax(dim=-1)
        return sum(logprobs[len(asked) + place - 1, token].item() for place, token in enumerate(said)) / len(said)

    best = max(options, key=mean)
    for right in options:
        order = [right, *(each for each in options if each != right)]
        found = answer_questions(model, tokenizer, [Question("Which?", order)], dtype=torch.float32)
        assert found.values == {"Which?": float(right == best)}


def test_a_hundred_questions_are_packaged_with_four_different_options_each() -> None:
    questions = packaged_questions()
    assert len({each.question for each in questions}) == len(questions) == 100
    assert all(len(set(each.options)) == 4 and all(each.options) for each in questions)


def test_a_function_of_the_users_own_says_a_number_for_each_item(mine: ModuleType) -> None:
    def suite(model: Any, tokenizer: Any) -> dict[str, float]:
        return {"layers": model.config.num_hidden_layers, "vocabulary": float(len(tokenizer))}

    mine.suite = suite  # type: ignore[attr-defined]
    text, own = measured("my_suites:suite", passages=2)
    assert text.suite == "text"
    assert len(text.values) == 2
    assert own == Measure("my_suites:suite", {"layers": 2.0, "vocabulary": 259.0})


def test_a_function_that_fails_or_says_no_numbers_ends_the_run_in_a_sentence(mine: ModuleType) -> None:
    mine.fails = lambda *_: 1 / 0  # type: ignore[attr-defined]
    mine.words = lambda *_: {"a": "well"}  # type: ignore[attr-defined]
    with pytest.raises(RlhfError, match="the suite my_suites:fails failed: ZeroDivisionError: division by zero"):
        measured("my_suites:fails")
    with pytest.raises(RlhfError, match="my_suites:words must return a number for each item by its name, but returned"):
        measured("my_suites:words")
    with pytest.raises(RlhfError, match="the suite my_suites:none failed: AttributeError"):
        measured("my_suites:none")


@pytest.mark.parametrize(
    ("suite", "why"),
    [
        ("os:getcwd", r"suite 'os:getcwd' lies in a module that is not allowed .*add os to RLHF_REWARD_MODULES"),
        ("question", r"suites names 'question'; expected questions, lm_eval:<task> or package.module:function"),
    ],
)
def test_a_suite_that_leads_nowhere_is_refused_before_a_run(suite: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_suites(ForgettingConfig(suites=(suite,)), ())


def test_a_task_of_lm_evaluation_harness_is_refused_where_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="lm-evaluation-harness is not installed; install lm-eval, or leave"):
        check_suites(ForgettingConfig(suites=("lm_eval:arc_easy",)), ())


def test_its_directory_of_tasks_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    with pytest.raises(ConfigError, match="task_directory is '/nowhere', but there is no such directory"):
        check_suites(ForgettingConfig(suites=("lm_eval:arc_easy",), task_directory="/nowhere"), ())


def test_the_packaged_texts_and_the_code_of_a_suite_are_part_of_what_its_figures_depend_on() -> None:
    facts = suite_facts(ForgettingConfig(suites=("tests.tiny_llama:tiny_llama", "questions")))
    assert set(facts) == {"passages.txt", "questions.txt", "tests.tiny_llama:tiny_llama"}
    assert all(len(str(digest)) == 64 for digest in facts.values())

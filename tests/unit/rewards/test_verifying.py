"""Who says whether an answer is right: every judge by name, and what each refuses."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf_core.config import DataConfig, PipelineConfig, TemplateConfig
from rlhf_core.data import PromptTemplate
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.rewards.structure import DEFAULT_TAGS
from rlhf_core.rewards.verifying import (
    Answered,
    Judge,
    Verdict,
    asks_for_answers,
    build_judge,
    judge_facts,
    judge_of,
    verifier_name,
)
from tests.tiny_llama import tiny_tokenizer

TEMPLATE = PromptTemplate(tiny_tokenizer(), TemplateConfig())
THINKING = PromptTemplate(tiny_tokenizer(), TemplateConfig.model_validate({"tags": DEFAULT_TAGS}))
RIGHT, WRONG, ILL = "<answer>42</answer>", "<answer>41</answer>", "42"
MODULE = """
import time

def share(prompt, response, answer):
    return {"<answer>right</answer>": 1.0, "<answer>half</answer>": 0.5, "<answer>ten</answer>": 10.0,
            "<answer>rounded</answer>": 1.0000001, "<answer>tenths</answer>": sum([0.1] * 10),
            "<answer>none</answer>": None}[response]

def slow(prompt, response, answer):
    time.sleep(5.0 if "slow" in response else 0.0)
    return 1.0

def text(prompt, response, answer):
    return float((prompt, response, answer) == ("6 x 7", "<answer>42</answer>", "42"))
"""

Make = Callable[..., Judge]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    (tmp_path / "own_verifiers.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    made: list[Judge] = []

    def build(name: str | None, template: PromptTemplate = TEMPLATE, timeout_s: float = 10.0, **others: str) -> Judge:
        given = {"task": others.get("task"), "allowed_modules": ("own_verifiers",), "timeout_s": timeout_s}
        made.append(build_judge(name, template=template, **given))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for judge in made:
        judge.close()


def row(response: str, *, answer: str | None = "42", entry: str | None = None, ended: bool = True) -> Answered:
    return Answered("6 x 7", response, answer, entry, "key", ended)


def judged(judge: Judge, *responses: str) -> list[Verdict]:
    return judge.judge([row(response) for response in responses])


def said(judge: Judge, *responses: str) -> list[tuple[float, bool]]:
    return [(verdict.score, verdict.well_formed) for verdict in judged(judge, *responses)]


def test_exact_wants_the_answer_alone_in_its_tags(make: Make) -> None:
    for name in ("exact", None):
        found = said(make(name), RIGHT, "<answer>42.0</answer>", WRONG, ILL, f"So {RIGHT}")
        assert found == [(1.0, True), (1.0, True), (0.0, True), (0.0, False), (0.0, False)]


@pytest.mark.parametrize("name", ["gsm8k_reward_fn", "math_competition_reward_fn"])
def test_coatis_functions_count_as_shares_of_their_ten(make: Make, name: str) -> None:
    # 10 for the answer in its form, 1 for the form alone, 0 without: over 10
    found = said(make(name), RIGHT, f"6 x 7 is {RIGHT}", WRONG, ILL)
    assert found == [(1.0, True), (1.0, True), (0.1, True), (0.0, False)]


def test_the_form_is_the_templates_own(make: Make) -> None:
    judge = make("gsm8k_reward_fn", THINKING)
    assert said(judge, f"<think>6 x 7</think>{RIGHT}", RIGHT) == [(1.0, True), (0.0, False)]


@pytest.mark.parametrize("name", ["exact", "gsm8k_reward_fn", "own_verifiers:text"])
def test_an_answer_that_did_not_end_is_worth_nothing(make: Make, name: str) -> None:
    assert make(name).judge([row(RIGHT), row(RIGHT, ended=False)]) == [(1.0, True, None), (0.0, False, None)]


def test_a_function_of_ones_own_says_from_0_to_1(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    responses = [f"<answer>{word}</answer>" for word in ("right", "half", "rounded", "tenths", "ten", "none")]
    with caplog.at_level(logging.WARNING):
        found = judged(make("own_verifiers:share"), *responses)
    assert [verdict.score for verdict in found] == [1.0, 0.5, 1.0, 1.0, 0.0, 0.0]  # ten tenths sum to 1 - 1e-16
    outside, none = (str(verdict.failure) for verdict in found[4:])
    assert outside.startswith("no_number: it returned 10, but a verifier says from 0 to 1")
    assert none == "no_number: it returned None, which is not a number"
    assert not any(verdict.failure for verdict in found[:4])
    assert "it returned 10, but a verifier says from 0 to 1" in caplog.messages[1]
    assert "it returned None, which is not a number" in caplog.messages[0]
    assert "it does not judge the response to '6 x 7' (key key)" in caplog.messages[1]


def test_a_function_that_takes_too_long_costs_its_response_and_no_other(make: Make) -> None:
    judge = make("own_verifiers:slow", timeout_s=0.5)
    found = judged(judge, RIGHT, "<answer>slow</answer>", RIGHT)
    assert [verdict.score for verdict in found] == [1.0, 0.0, 1.0]
    assert [verdict.failure for verdict in found] == [None, "timed_out: it took longer than 0.5 s", None]


@pytest.mark.parametrize("name", ["exact", "gsm8k_reward_fn", "own_verifiers:text"])
def test_a_prompt_without_an_answer_is_refused(make: Make, name: str) -> None:
    with pytest.raises(DataError, match=r"'6 x 7' has none; give problems with answers \(data.problems\), or let"):
        make(name).judge([row(RIGHT), row(RIGHT, answer=None)])


@pytest.mark.integration
def test_a_problem_without_its_tasks_record_is_refused(make: Make) -> None:
    with pytest.raises(DataError, match=r"reasoning_gym:countdown needs the record .* draw the data from that task"):
        judged(make("reasoning_gym:countdown"), RIGHT)


@pytest.mark.parametrize(
    ("name", "task", "reason"),
    [
        ("gsm8k", None, "data.verifier is 'gsm8k' \\(`exact` compares .*known are gsm8k_reward_fn and"),
        ("gsm8k_reward", None, "did you mean gsm8k_reward_fn"),
        ("other.module:f", None, "not allowed to run here; add other.module to RLHF_REWARD_MODULES"),
        ("own_verifiers:absent", None, "'own_verifiers:absent' cannot be imported: .*absent"),
        ("reasoning_gym:countdwn", None, "did you mean countdown"),
        ("reasoning_gym:countdown", "gcd", "records of task 'countdown', but data.task is 'gcd'"),
    ],
)
def test_verifiers_that_cannot_be_are_refused_in_a_sentence(make: Make, name: str, task: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make(name, task=task)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ({"task": "number_sorting"}, "exact"),
        ({"task": "palindrome_generation"}, "reasoning_gym:palindrome_generation"),
        ({"task": "composite"}, "reasoning_gym:composite"),
        ({"task": "number_sorting", "verifier": "reasoning_gym:number_sorting"}, "reasoning_gym:number_sorting"),
        ({"problems": "x.jsonl"}, "exact"),
        ({"problems": "x.jsonl", "verifier": "gsm8k_reward_fn"}, "gsm8k_reward_fn"),
        ({"prompts": "x.jsonl"}, None),
        ({"preferences": "x.jsonl"}, None),
        ({"demonstrations": "x.jsonl"}, None),
        ({"prompts": "x.jsonl", "evaluation": "y.jsonl"}, "exact"),
    ],
)
def test_what_judges_unless_one_is_named(data: dict[str, str], name: str | None) -> None:
    config = DataConfig.model_validate(data)
    assert verifier_name(config) == name
    if name in {None, "exact"}:
        preset = PipelineConfig(name="test", data=config)
        assert (judge_of(preset, template=TEMPLATE, allowed_modules=()) is None) == (name is None)


@pytest.mark.parametrize(
    ("data", "answered"),
    [
        ({"task": "gcd"}, True),
        ({"problems": "x.jsonl"}, True),
        ({"demonstrations": "x.jsonl"}, False),
        ({"demonstrations": "x.jsonl", "verifier": "gsm8k_reward_fn"}, True),
        ({"preferences": "x.jsonl", "evaluation": "y.jsonl"}, False),  # only what is held out has answers
        ({"prompts": "x.jsonl", "demonstrations": "y.jsonl", "verifier": "exact"}, False),
    ],
)
def test_answers_of_ppos_prompts_are_known_from_the_configuration(data: dict[str, str], answered: bool) -> None:
    assert asks_for_answers(DataConfig.model_validate(data)) == answered


def facts(timeout_s: float = 5.0, **data: str) -> list[str | float | None] | None:
    told = {"name": "test", "data": data, "ppo": {"reward": {"timeout_s": timeout_s}}}
    return judge_facts(PipelineConfig.model_validate(told))


def test_verdicts_depend_on_the_judge_its_time_and_the_users_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('looked at, not run')")
    (package / "rewards.py").write_text("1")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert facts(prompts="x.jsonl") is None
    assert facts(problems="x.jsonl") == facts(problems="x.jsonl", timeout_s=1.0) == ["exact"]  # nothing takes time
    assert facts(problems="x.jsonl", verifier="gsm8k_reward_fn") == ["gsm8k_reward_fn", 5.0, None]
    assert facts(task="gcd", timeout_s=1.0) == ["reasoning_gym:gcd", 1.0, None]
    own = "own_package.rewards:right"
    # the digest of "1": printf 1 | sha256sum
    digest = "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"
    assert facts(problems="x.jsonl", verifier=own) == [own, 5.0, digest]
    (package / "rewards.py").write_text("2")
    assert facts(problems="x.jsonl", verifier=own) != [own, 5.0, digest]
    assert facts(problems="x.jsonl", verifier="own_package.absent:right") == ["own_package.absent:right", 5.0, None]

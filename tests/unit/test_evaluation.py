"""Evaluation keeps every problem's outcome, and refuses lengths at which right responses cannot end."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.config import EvaluationConfig, TemplateConfig
from rlhf_core.data import Problem, PromptTemplate
from rlhf_core.errors import DataError
from rlhf_core.evaluation import Outcome, evaluate_policy, outcomes_from_jsonl, outcomes_to_jsonl
from tests.tiny_llama import tiny_llama, tiny_tokenizer

PROBLEMS = [Problem(f"Say {i}", str(i)) for i in range(7)]
RIGHT_LENGTH = len("<answer>0</answer>") + 1  # one token a byte, and the stop token


@pytest.fixture
def template() -> PromptTemplate:
    return PromptTemplate(tiny_tokenizer(), TemplateConfig())


def taught(template: PromptTemplate, problems: list[Problem]):
    """A tiny model that has learnt its right responses by heart, so that outcomes are known."""
    model = tiny_llama().train()
    prompts = [template.prompt_ids(problem.prompt) for problem in problems]
    responses = [template.response_ids(template.answer_text(problem.answer)) for problem in problems]
    ids = torch.tensor([a + b for a, b in zip(prompts, responses, strict=True)])
    labels = ids.clone()
    labels[:, : len(prompts[0])] = -100
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(300):
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.01:
            break
    return model.eval()


def test_outcomes_say_what_was_right(template: PromptTemplate) -> None:
    torch.set_num_threads(1)
    model = taught(template, PROBLEMS)
    asked = [*PROBLEMS[:5], Problem(PROBLEMS[5].prompt, "9")]  # the last one's answer is not what was learnt
    progress: list[tuple[int, int]] = []
    outcomes = evaluate_policy(
        model,
        template,
        asked,
        EvaluationConfig(max_new_tokens=RIGHT_LENGTH + 2, batch_size=4),
        on_progress=lambda done, total: progress.append((done, total)),
    )
    assert outcomes[0] == Outcome(PROBLEMS[0].key, "Say 0", "0", "<answer>0</answer>", True, True, False)
    assert [outcome.correct for outcome in outcomes] == [True] * 5 + [False]
    assert all(outcome.well_formed and not outcome.truncated for outcome in outcomes)
    assert progress == [(4, 6), (6, 6)]


def test_a_response_that_was_cut_off_is_reported_as_such(template: PromptTemplate) -> None:
    outcomes = evaluate_policy(tiny_llama(), template, PROBLEMS[:2], EvaluationConfig(max_new_tokens=RIGHT_LENGTH + 2))
    assert all(outcome.truncated and not outcome.correct and not outcome.well_formed for outcome in outcomes)


def test_a_length_that_cuts_right_responses_off_is_refused_before_generation(template: PromptTemplate) -> None:
    problems = [*PROBLEMS, Problem("Say much", "1234")]
    with pytest.raises(DataError, match=f"takes {RIGHT_LENGTH + 3} tokens .*raise it to {RIGHT_LENGTH + 5} or more"):
        evaluate_policy(None, template, problems, EvaluationConfig(max_new_tokens=RIGHT_LENGTH + 4))


def test_no_problem_is_refused(template: PromptTemplate) -> None:
    with pytest.raises(DataError, match="no problem to evaluate"):
        evaluate_policy(None, template, [], EvaluationConfig())


def test_outcomes_pass_through_json_lines() -> None:
    outcomes = [Outcome("ab", "é\n", "1", "\ufffd\u2028", False, True, False)]
    assert outcomes_from_jsonl(outcomes_to_jsonl(outcomes)) == outcomes

"""Evaluation keeps every problem's outcome, and refuses lengths at which right responses cannot end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from rlhf_core import evaluation
from rlhf_core.config import EvaluationConfig, TemplateConfig
from rlhf_core.data import Problem, PromptTemplate
from rlhf_core.errors import DataError
from rlhf_core.evaluation import (
    ConstantAnswer,
    Outcome,
    best_constant,
    check_judged,
    evaluate_policy,
    evaluation_metrics,
    outcomes_from_jsonl,
    outcomes_to_jsonl,
)
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.rewards.structure import DEFAULT_TAGS
from rlhf_core.rewards.verifying import Answered, ExactJudge, Verdict, build_judge
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
        ExactJudge("answer"),
        on_progress=lambda done, total: progress.append((done, total)),
    )
    assert outcomes[0] == Outcome(PROBLEMS[0].key, "Say 0", "0", "<answer>0</answer>", True, True, False, 1.0, 19)
    assert [outcome.correct for outcome in outcomes] == [True] * 5 + [False]
    assert all(outcome.well_formed and not outcome.truncated for outcome in outcomes)
    assert progress == [(4, 6), (6, 6)]


def test_a_response_that_was_cut_off_is_reported_as_such(template: PromptTemplate) -> None:
    config = EvaluationConfig(max_new_tokens=RIGHT_LENGTH + 2)
    outcomes = evaluate_policy(tiny_llama(), template, PROBLEMS[:2], config, ExactJudge("answer"))
    assert all(outcome.truncated and not outcome.correct and not outcome.well_formed for outcome in outcomes)


def test_a_length_that_cuts_right_responses_off_is_refused_before_generation(template: PromptTemplate) -> None:
    problems = [*PROBLEMS, Problem("Say much", "1234")]
    with pytest.raises(DataError, match=f"takes {RIGHT_LENGTH + 3} tokens .*raise it to {RIGHT_LENGTH + 5} or more"):
        evaluate_policy(None, template, problems, EvaluationConfig(max_new_tokens=RIGHT_LENGTH + 4), ExactJudge(""))


def test_no_problem_is_refused(template: PromptTemplate) -> None:
    with pytest.raises(DataError, match="no problem to evaluate"):
        evaluate_policy(None, template, [], EvaluationConfig(), ExactJudge(""))


def test_outcomes_pass_through_json_lines() -> None:
    outcomes = [Outcome("ab", "é\n", "1", "\ufffd\u2028", False, True, False, 0.1)]
    assert outcomes_from_jsonl(outcomes_to_jsonl(outcomes)) == outcomes


def test_a_reward_model_scores_open_prompts_in_its_standard_deviations(template: PromptTemplate) -> None:
    torch.manual_seed(0)
    judge = RewardModel.from_causal_lm(tiny_llama(seed=4, initializer_range=0.2))
    judge.score_mean.fill_(0.25)
    judge.score_std.fill_(0.5)
    policy = tiny_llama(seed=1, initializer_range=0.3)
    problems = [Problem("Why?"), Problem("Why is that so?")]
    config = EvaluationConfig(max_new_tokens=5)
    outcomes = evaluate_policy(policy, template, problems, config, judge)
    for problem, outcome in zip(problems, outcomes, strict=True):
        # the greedy answer, without padding, by transformers
        ids = torch.tensor([template.prompt_ids(problem.prompt)])
        ends = {"eos_token_id": template.stop_ids[0], "pad_token_id": template.pad_id}
        whole = policy.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, **ends)
        raw = judge(whole, torch.ones_like(whole, dtype=torch.bool)).item()
        assert outcome.score == pytest.approx((raw - 0.25) / 0.5, rel=1e-4)
        assert (outcome.correct, outcome.answer) == (False, "")
        assert outcome.truncated == (whole[0, -1].item() not in template.stop_ids)
        assert outcome.well_formed != outcome.truncated


def outcome(score: float, *, well_formed: bool = True) -> Outcome:
    return Outcome("k", "p", "a", "r", score >= 1.0, well_formed, False, score)


def test_answers_without_a_verdict_are_neither_right_nor_wrong() -> None:
    unknown = replace(outcome(0.0), failure="timed_out: it took longer than 10 s", truncated=True)
    rows = [outcome(1.0), unknown, outcome(0.0), unknown, outcome(1.0)]
    found, known = (evaluation_metrics(each, "f", 0.95) for each in (rows, [rows[0], rows[2], rows[4]]))
    assert found == known | {"unjudged": 2}
    assert outcomes_from_jsonl(outcomes_to_jsonl(rows)) == rows
    check_judged(rows, judge="f", most=0.4, what="answers")
    with pytest.raises(
        DataError, match=r"^2 of 5 answers could not be judged, .*\(0.3\): f failed 2 times \(timed out 2"
    ):
        check_judged(rows, judge="f", most=0.3, what="answers")
    with pytest.raises(DataError, match="1 of 2 answers could not be judged"):  # no interval of one
        check_judged(rows[:2], judge="f", most=1.0, what="answers")


class Moody:
    """A judge that fails at one problem, whoever answers."""

    def judge(self, rows: Sequence[Answered]) -> list[Verdict]:
        return [
            Verdict(0.0 if row.answer == "3" else 1.0, True, "died: x" if row.answer == "3" else None) for row in rows
        ]

    def close(self) -> None: ...


def test_a_verdict_that_fails_is_kept_with_its_outcome_and_counts_for_no_constant(template: PromptTemplate) -> None:
    config = EvaluationConfig(max_new_tokens=RIGHT_LENGTH + 2)
    outcomes = evaluate_policy(tiny_llama(), template, PROBLEMS, config, Moody())
    assert [each.failure for each in outcomes] == ["", "", "", "died: x", "", "", ""]
    assert [each.correct for each in outcomes] == [True, True, True, False, True, True, True]
    assert best_constant(PROBLEMS, template, Moody()) == ConstantAnswer("0", 1.0)


def test_figures_by_hand() -> None:
    # of five: two right, three well formed, so 2/5 right and 2/3 given the form; the mean score (1 + 1 + .1) / 5
    rows = [outcome(1.0), outcome(1.0), outcome(0.1), outcome(0.0, well_formed=False), outcome(0.0, well_formed=False)]
    found = evaluation_metrics(rows, "gsm8k_reward_fn", 0.95)
    # Wilson, n = 5, p = 0.4, z^2 = 3.841459: centre (0.4 + 0.3841459) / 1.7682918 = 0.443448,
    # half = 1.959964 / 1.7682918 * sqrt(0.048 + 0.0384146) = 0.325828
    expected = {
        "problems": 5, "unjudged": 0, "judge": "gsm8k_reward_fn", "score": 0.42, "accuracy": 0.4,
        "accuracy_given_form": 2 / 3,
        "well_formed": 0.6, "truncated": 0.0, "low": 0.443448 - 0.325828, "high": 0.443448 + 0.325828,
    }  # fmt: skip
    assert found.keys() == expected.keys()
    assert all(found[name] == pytest.approx(value, abs=1e-5) for name, value in expected.items() if name != "judge")


def test_a_reward_models_figures_are_a_mean_score_and_no_accuracy() -> None:
    # mean 3, standard error sqrt(10 / 3 / 4) = 0.912871, times 1.959964
    found = evaluation_metrics([outcome(score) for score in (1.0, 2.0, 4.0, 5.0)], "reward_model", 0.95)
    assert (found["score"], found["low"], found["high"]) == pytest.approx((3.0, 1.210806, 4.789194), abs=1e-5)
    assert not {"accuracy", "accuracy_given_form"} & found.keys()


def test_the_best_constant_answer_is_judged_as_any_other(template: PromptTemplate) -> None:
    # "7" stands twice and is right for "7.0" too: 3 of 5; "1" and "2" are right once
    problems = [Problem(f"p{row}", answer) for row, answer in enumerate(["1", "7", "7.0", "2", "7"])]
    assert best_constant(problems, template, ExactJudge("answer")) == ConstantAnswer("7", 0.6)
    assert best_constant([Problem("open"), Problem("prompts")], template, ExactJudge("answer")) is None


def test_of_many_problems_fewer_constant_answers_are_tried(
    template: PromptTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = [Problem(f"p{row}", answer) for row, answer in enumerate(["1", "2", "2", "1.0", "1.0"])]
    tried: list[str] = []

    class Watched(ExactJudge):
        def judge(self, rows: Sequence[Answered]) -> list[Verdict]:
            tried.append(rows[0].response)
            return super().judge(rows)

    monkeypatch.setattr(evaluation, "CONSTANT_VERDICTS", 14)
    # "2" and "1.0" are the most common, and two times five verdicts are all that 14 allow
    assert best_constant(problems, template, Watched("answer")) == ConstantAnswer("1.0", 0.6)
    assert tried == ["<answer>2</answer>", "<answer>1.0</answer>"]


def test_a_constant_answer_has_the_form_that_the_judge_wants() -> None:
    thinking = PromptTemplate(tiny_tokenizer(), TemplateConfig.model_validate({"tags": DEFAULT_TAGS}))
    problems = [Problem("a", "2"), Problem("b", "2"), Problem("c", "3")]
    judge = build_judge("gsm8k_reward_fn", task=None, template=thinking, allowed_modules=(), timeout_s=10.0)
    for each in (judge, ExactJudge("answer")):  # the second wants the answer alone in its tags
        assert best_constant(problems, thinking, each) == ConstantAnswer("2", pytest.approx(2 / 3))
    judge.close()

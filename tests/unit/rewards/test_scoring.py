"""Sources are scaled, weighted and added; what fails costs its row a zero."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from rlhf_core.config import RewardConfig, TemplateConfig
from rlhf_core.data import PromptTemplate
from rlhf_core.data.gym import draw_problems
from rlhf_core.errors import ConfigError, DataError, ModelError
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.rewards import RLVRRewardModel, ScoringBatch, build_scorer, gsm8k_reward_fn, math_competition_reward_fn
from rlhf_core.rewards.verifying import ExactJudge, FunctionJudge, build_judge
from rlhf_core.types import Prompt
from tests.tiny_llama import tiny_llama, tiny_tokenizer

torch.set_num_threads(1)

TEMPLATE = PromptTemplate(tiny_tokenizer(), TemplateConfig())
RIGHT, WRONG, ILL = "<answer>42</answer>", "<answer>41</answer>", "42"
MODULE = """
import os

def length(prompt, response, answer):
    return len(response) / 100

def moody(prompt, response, answer):
    if "41" in response:
        raise RuntimeError("in no mood")
    if response == "42":
        os._exit(1)
    return 0.5
"""


def batch(*responses: str, answer: str | None = "42", entry: str | None = None) -> ScoringBatch:
    """Rows of one prompt token and the response's, as a maker makes them."""
    ids = [TEMPLATE.response_ids(text) for text in responses]
    width = max(map(len, ids))
    action_mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids], dtype=torch.bool)
    sequences = torch.tensor([[5, *row, *[TEMPLATE.pad_id] * (width - len(row))] for row in ids])
    attended = torch.cat([torch.ones(len(ids), 1, dtype=torch.bool), action_mask], dim=1)
    prompts = [Prompt((5,), "6 x 7", answer, f"key{row}", entry) for row in range(len(ids))]
    ended = torch.ones(len(ids), dtype=torch.bool)
    return ScoringBatch(prompts, list(responses), ended, sequences, attended, action_mask)


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_rewards.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return "own_rewards"


def test_a_score_is_the_weighted_sum_of_shares_and_raw_values_are_kept(own_module: str) -> None:
    config = RewardConfig(verifier=2.0, functions={"gsm8k_reward_fn": 3.0, f"{own_module}:length": 0.5})
    scorer = build_scorer(config, None, template=TEMPLATE, allowed_modules=[own_module])
    scores = scorer.score(batch(RIGHT, WRONG, ILL))
    scorer.close()
    assert scores.raw["verifier"].tolist() == [1.0, 0.0, 0.0]
    assert scores.raw["gsm8k_reward_fn"].tolist() == [10.0, 1.0, 0.0]
    lengths = [len(RIGHT) / 100, len(WRONG) / 100, 0.02]
    assert scores.raw[f"{own_module}:length"].tolist() == pytest.approx(lengths)
    by_hand = [2 * 1 + 3 * 1.0 + 0.5 * lengths[0], 3 * 0.1 + 0.5 * lengths[1], 0.5 * lengths[2]]
    assert scores.total.tolist() == pytest.approx(by_hand)
    assert {name: part.tolist() for name, part in scores.parts.items()} == {
        "verifier": [2.0, 0.0, 0.0],
        "gsm8k_reward_fn": pytest.approx([3.0, 0.3, 0.0]),
        f"{own_module}:length": pytest.approx([0.5 * length for length in lengths]),
    }
    assert torch.equal(torch.stack(list(scores.parts.values())).sum(dim=0), scores.total)
    assert scores.well_formed is not None
    assert scores.well_formed.tolist() == [True, True, False]


def test_a_source_without_weight_is_heard_and_adds_nothing() -> None:
    config = RewardConfig(verifier=0.0, reward_model=2.0)
    lengths = partial(build_scorer, config, lambda _, mask: mask.sum(dim=1).float(), template=TEMPLATE)
    scores = lengths(judge=ExactJudge("answer")).score(batch(RIGHT, ILL))
    assert scores.raw["verifier"].tolist() == [1.0, 0.0]
    assert scores.parts["verifier"].tolist() == [0.0, 0.0]
    assert torch.equal(scores.parts["reward_model"], scores.total)
    unheard = lengths().score(batch(RIGHT, ILL))
    assert unheard.raw.keys() == unheard.parts.keys() == {"reward_model"}
    assert unheard.well_formed is None


def test_the_datas_verifier_judges_and_its_form_is_the_samples() -> None:
    judge = build_judge("gsm8k_reward_fn", task=None, template=TEMPLATE, allowed_modules=(), timeout_s=10.0)
    scorer = build_scorer(RewardConfig(verifier=2.0), None, template=TEMPLATE, judge=judge)
    scores = scorer.score(batch(f"So {RIGHT}", WRONG, ILL))
    # the function's 10, 1 and 0 over 10, times 2; words before the tags do no harm to its form
    assert scores.total.tolist() == pytest.approx([2.0, 0.2, 0.0])
    assert scores.well_formed is not None
    assert scores.well_formed.tolist() == [True, True, False]
    scorer.close()


def test_a_verifier_with_a_weight_refuses_prompts_without_answers_and_without_one_lets_them_be() -> None:
    rows = batch(RIGHT, WRONG)
    rows = rows._replace(prompts=[rows.prompts[0], rows.prompts[1]._replace(answer=None)])
    with pytest.raises(DataError, match=r"verifier exact compares with a right answer, .*ppo.reward.verifier 0"):
        build_scorer(RewardConfig(verifier=0.5), None, template=TEMPLATE).score(rows)
    others = RewardConfig(verifier=0.0, reward_model=1.0)
    scorer = build_scorer(others, lambda _, m: m.sum(dim=1).float(), template=TEMPLATE, judge=ExactJudge("answer"))
    assert scorer.score(rows).raw["verifier"].tolist() == [1.0, 0.0]


def test_unscaled_a_ten_counts_ten_as_upstream() -> None:
    config = RewardConfig(verifier=0.0, functions={"gsm8k_reward_fn": 1.0})
    scorer = build_scorer(config, None, template=TEMPLATE, scaled=False)
    assert scorer.score(batch(RIGHT, WRONG)).total.tolist() == [10.0, 1.0]
    scorer.close()


def test_tags_of_the_template_are_the_functions_form() -> None:
    tags = {"answer_start": {"text": "[["}, "answer_end": {"text": "]]"}}
    template = PromptTemplate(tiny_tokenizer(), TemplateConfig(tags=tags))
    scorer = build_scorer(RewardConfig(functions={"gsm8k_reward_fn": 1.0}), None, template=template)
    assert scorer.score(batch("[[42]]", RIGHT)).raw["gsm8k_reward_fn"].tolist() == [10.0, 0.0]
    scorer.close()


def test_a_sample_at_which_a_function_fails_abstains_with_a_warning_of_names(
    own_module: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = RewardConfig(verifier=0.0, functions={f"{own_module}:moody": 1.0})
    scorer = build_scorer(config, None, template=TEMPLATE, allowed_modules=[own_module])
    with caplog.at_level(logging.WARNING):
        scores = scorer.score(batch(RIGHT, WRONG, ILL, RIGHT))
    scorer.close()
    assert scores.total.tolist() == [0.5, 0.0, 0.0, 0.5]
    assert scores.abstains.tolist() == [False, True, True, False]
    assert scores.failures == [
        {}, {"own_rewards:moody": "raised: it raised RuntimeError: in no mood"},
        {"own_rewards:moody": "died: it ended its process (exit code 1)"}, {},
    ]  # fmt: skip
    raised, crashed = [record.getMessage() for record in caplog.records]
    assert raised == (
        "reward function own_rewards:moody: it raised RuntimeError: in no mood; "
        "it does not judge the response to '6 x 7' (key key1)"
    )
    assert "it ended its process (exit code 1)" in crashed
    assert "key2" in crashed


def test_what_cannot_be_imported_is_refused_at_once(own_module: str) -> None:
    config = RewardConfig(functions={f"{own_module}:missing": 1.0})
    with pytest.raises(ConfigError, match=r"'own_rewards:missing' cannot be imported: it raised AttributeError"):
        build_scorer(config, None, template=TEMPLATE, allowed_modules=[own_module])
    with pytest.raises(ConfigError, match="RLHF_REWARD_MODULES"):
        build_scorer(config, None, template=TEMPLATE)


def test_a_judge_does_not_outlive_the_scorer_that_comes_to_nothing() -> None:
    for config in (RewardConfig(functions={"nowhere:missing": 1.0}), RewardConfig(reward_model=1.0)):
        judge = build_judge("gsm8k_reward_fn", task=None, template=TEMPLATE, allowed_modules=(), timeout_s=10.0)
        assert isinstance(judge, FunctionJudge)
        child = judge._process.pid
        assert child is not None
        with pytest.raises(ConfigError):
            build_scorer(config, None, template=TEMPLATE, judge=judge)
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


@pytest.mark.integration
def test_a_task_scores_by_its_own_record() -> None:
    problem = draw_problems("countdown", {}, seed=1, count=1)[0]
    scorer = build_scorer(
        RewardConfig(verifier=0.0, functions={"reasoning_gym:countdown": 1.0}), None, template=TEMPLATE
    )
    turned = f"<answer>({problem.answer})</answer>"  # another expression of the same value: no string comparison
    scores = scorer.score(batch(turned, "<answer>1</answer>", "no", answer=problem.answer, entry=problem.entry))
    assert scores.total[0] == 1.0
    assert scores.total[1] < 0.5
    assert scores.total[2] == 0.0
    with pytest.raises(DataError, match=r"needs the record .* has none; draw the data from that task"):
        scorer.score(batch(turned))
    scorer.close()


@pytest.mark.integration
def test_our_short_form_of_sorting_is_read_as_the_librarys_list() -> None:
    problem = draw_problems("number_sorting", {}, seed=1, count=1)[0]
    config = RewardConfig(verifier=0.0, functions={"reasoning_gym:number_sorting": 1.0})
    scorer = build_scorer(config, None, template=TEMPLATE)
    right, wrong = problem.answer, " ".join(reversed(str(problem.answer).split()))
    scores = scorer.score(batch(f"<answer>{right}</answer>", f"<answer>{wrong}</answer>", entry=problem.entry))
    scorer.close()
    assert scores.total[0] == 1.0
    assert scores.total[1] < 0.5


def test_functions_in_place_of_a_reward_model_count_by_shares() -> None:
    model = RLVRRewardModel([gsm8k_reward_fn, math_competition_reward_fn], tokenizer=tiny_tokenizer(), tags=None)
    scorer = build_scorer(RewardConfig(verifier=0.0, reward_model=0.5), model, template=TEMPLATE)
    scores = scorer.score(batch(f"<think></think>{RIGHT}", f"<think></think>{WRONG}", ILL))
    scorer.close()
    assert scores.total.tolist() == pytest.approx([0.5 * 2.0, 0.5 * 0.2, 0.0])
    assert {name: values.tolist() for name, values in scores.raw.items() if name != "verifier"} == {
        "gsm8k_reward_fn": [10.0, 1.0, 0.0],
        "math_competition_reward_fn": [10.0, 1.0, 0.0],
    }


def test_a_reward_model_of_another_vocabulary_is_refused() -> None:
    model = RewardModel.from_causal_lm(tiny_llama())
    scorer = build_scorer(RewardConfig(reward_model=1.0), model, template=TEMPLATE)
    rows = batch(RIGHT)
    rows.sequences[0, 0] = 259
    with pytest.raises(ModelError, match="token 259, but the reward model knows 259 tokens"):
        scorer.score(rows)


def test_anything_called_like_a_reward_model_is_taken_at_its_word() -> None:
    config = RewardConfig(verifier=0.0, reward_model=2.0)
    scorer = build_scorer(config, lambda _, mask: mask.sum(dim=1).float(), template=TEMPLATE)
    rows = batch(RIGHT, ILL)
    assert scorer.score(rows).total.tolist() == [2.0 * mask.sum().item() for mask in rows.attention_mask]
    wrong = build_scorer(config, lambda _, mask: mask.float(), template=TEMPLATE)
    with pytest.raises(ModelError, match="should return one score for each"):
        wrong.score(rows)

"""The evaluation as a stage: who judges, what is stored of it, and when it is done anew."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rlhf_core import evaluation
from rlhf_core.config import ForgettingConfig, ModelConfig, PipelineConfig
from rlhf_core.data import Problem, problems_to_jsonl
from rlhf_core.errors import BaseChangedError, ConfigError, DataError, ModelError
from rlhf_core.evaluation import outcomes_from_jsonl
from rlhf_core.forgetting.measures import measures_from_jsonl
from rlhf_core.generation import sampling
from rlhf_core.models.base import WEIGHTS, copies_of
from rlhf_core.models.loading import model_digest
from rlhf_core.models.reward_model import RewardModel
from tasks import evaluate as evaluate_module
from tasks.context import Context
from tasks.evaluate import MEASURES, OUTCOMES, contestants, evaluate_policy, find_judge
from tasks.results import Parent
from tests.tiny_llama import tiny_llama, tiny_tokenizer, write_tiny_llama

CLOSED = [Problem("1+1?", "2"), Problem("2+2?", "4"), Problem("4-2?", "2")]
OPEN = [Problem("Why?"), Problem("How?")]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Parent:
    directory = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", initializer_range=0.3)
    return Parent(uri="model/tiny", digest="a" * 64, path=str(directory))


def dataset(context: Context, problems: list[Problem]) -> Parent:
    made = context.store.commit("dataset", "test", {"evaluation.jsonl": problems_to_jsonl(problems)})
    return Parent(uri=made.uri, digest=made.digest)


def scorer(context: Context, directory: Path, *, seed: int = 4) -> Parent:
    torch.manual_seed(seed)
    RewardModel.from_causal_lm(tiny_llama(seed=seed, initializer_range=0.2)).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    made = context.store.commit("reward-model", "test", directory)
    return Parent(uri=made.uri, digest=made.digest)


def config(judge: str = "verifier", max_new_tokens: int = 22, **data: Any) -> PipelineConfig:
    evaluation = {"max_new_tokens": max_new_tokens, "judge": judge}
    return PipelineConfig.model_validate({"name": "test", "data": data, "evaluation": evaluation})


def test_the_best_constant_answer_stands_beside_the_accuracy(
    context: Context, policy: Parent, caplog: pytest.LogCaptureFixture
) -> None:
    data = dataset(context, CLOSED)
    made = evaluate_policy.fn(config(problems="x.jsonl"), policy, data)
    found = made.metrics
    assert (found["judge"], found["problems"]) == ("exact", 3)
    assert (found["constant_answer"], found["constant_accuracy"]) == ("2", pytest.approx(2 / 3))
    assert {"accuracy", "accuracy_given_form", "score", "low", "high", "well_formed", "truncated"} <= found.keys()
    assert "always answering '2' would be 0.667 right" in caplog.messages[-1]
    again = evaluate_policy.fn(config(problems="x.jsonl"), policy, data)
    assert (again.uri, again.reused) == (made.uri, True)
    other = evaluate_policy.fn(config(problems="x.jsonl", verifier="gsm8k_reward_fn"), policy, data)
    assert (other.metrics["judge"], other.reused) == ("gsm8k_reward_fn", False)


def test_what_is_measured_beside_the_task_is_stored_by_item_and_its_settings_are_part_of_the_key(
    context: Context, policy: Parent, caplog: pytest.LogCaptureFixture
) -> None:
    data, asked = dataset(context, CLOSED), config(problems="x.jsonl")
    made = evaluate_policy.fn(asked, policy, data)
    measures = measures_from_jsonl(context.store.read_bytes(context.store.resolve(made.uri), MEASURES))
    assert len(measures["text"].values) == 24
    assert made.metrics["forgetting/text"] == pytest.approx(sum(measures["text"].values.values()) / 24)
    assert f"packaged text {made.metrics['forgetting/text']:.3f} nats per token" in caplog.messages[-1]
    none = asked.model_copy(
        update={"evaluation": asked.evaluation.model_copy(update={"forgetting": ForgettingConfig(passages=0)})}
    )
    without = evaluate_policy.fn(none, policy, data)
    assert not without.reused
    assert "forgetting/text" not in without.metrics


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_answers_are_computed_in_the_arithmetic_that_is_asked_for(
    context: Context, policy: Parent, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, asked = [], config(problems="x.jsonl")
    choose = sampling.choose_greedy
    monkeypatch.setattr(sampling, "choose_greedy", lambda logits: seen.append(logits.dtype) or choose(logits))
    answers = asked.evaluation.model_copy(update={"dtype": dtype})
    evaluate_policy.fn(asked.model_copy(update={"evaluation": answers}), policy, dataset(context, CLOSED))
    assert set(seen) == {getattr(torch, dtype)}


def test_a_reward_model_judges_open_prompts_and_is_part_of_the_key(
    context: Context, policy: Parent, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, judged = dataset(context, OPEN), config("reward_model", 6, prompts="x.jsonl")
    one, other = scorer(context, tmp_path / "one"), scorer(context, tmp_path / "other", seed=5)
    made = evaluate_policy.fn(judged, policy, data, one)
    rows = outcomes_from_jsonl(context.store.read_bytes(context.store.resolve(made.uri), OUTCOMES))
    assert made.metrics["score"] == pytest.approx(sum(row.score for row in rows) / 2)
    assert made.metrics["low"] < made.metrics["score"] < made.metrics["high"]
    assert made.metrics["judge"] == "reward_model"
    assert not {"accuracy", "accuracy_given_form", "constant_answer"} & made.metrics.keys()
    assert "of 2 answers by the reward model" in caplog.messages[-1]
    assert one.uri in {parent.uri for parent in context.store.resolve(made.uri).parents}
    anew = evaluate_policy.fn(judged, policy, data, other)
    assert not anew.reused
    assert anew.metrics["score"] != made.metrics["score"]


def test_a_reward_model_of_another_tokenizer_is_refused(context: Context, policy: Parent, tmp_path: Path) -> None:
    one = scorer(context, tmp_path / "one")
    other = tiny_tokenizer()
    other.add_tokens(["<another>"])
    other.save_pretrained(tmp_path / "one")
    made = context.store.commit("reward-model", "test", tmp_path / "one")
    data, judged = dataset(context, OPEN), config("reward_model", 6, prompts="x.jsonl")
    with pytest.raises(
        ModelError, match="the policy and reward-model/test@2 have different tokenizers: they differ in 1 token,"
    ):
        evaluate_policy.fn(judged, policy, data, Parent(uri=made.uri, digest=made.digest))
    assert evaluate_policy.fn(judged, policy, data, one).metrics["judge"] == "reward_model"


def test_answers_that_nobody_judged_are_asked_again_by_the_next_run(
    context: Context, policy: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter(["timed_out: 5 s"] * 2 + [""] * 2)
    usual = evaluation.evaluate_policy

    def answers(*given: Any, **named: Any) -> list[evaluation.Outcome]:
        first, *others = usual(*given, **named)
        return [replace(first, failure=next(failures)), *others]

    monkeypatch.setattr(evaluation, "evaluate_policy", answers)
    data = dataset(context, CLOSED)
    found = [evaluate_policy.fn(config(task="chain_sum", verifier="exact"), policy, data) for _ in range(4)]
    assert [each.metrics["unjudged"] for each in found] == [1, 1, 0, 0]
    assert [each.reused for each in found] == [False, False, False, True]


def test_the_same_weights_under_another_name_are_evaluated_once_and_keep_their_name(
    context: Context, policy: Parent
) -> None:
    data, judged = dataset(context, CLOSED), config(problems="x.jsonl")
    first = evaluate_policy.fn(judged, policy, data)
    renamed = policy.model_copy(update={"uri": "policy/other@1"})
    again = evaluate_policy.fn(judged, renamed, data)
    assert (first.metrics["policy"], again.metrics["policy"]) == ("model/tiny", "policy/other@1")
    assert (again.reused, again.uri) == (True, first.uri)


def test_what_ppo_went_on_from_is_evaluated_beside_its_policy(
    context: Context, policy: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate_module, "base_model", lambda *_: policy)
    store = context.store
    sft = store.commit("sft", "test", {"x": b"1"})
    first = store.commit("policy", "test", {"x": b"2"}, parents=[sft])
    second = store.commit("policy", "test", {"x": b"3"}, parents=[first])
    judged = config(problems="x.jsonl")
    assert {role: each.uri for role, each in contestants(judged, first.uri).items()} == {
        "sft": sft.uri, "ppo": first.uri,
    }  # fmt: skip
    store.set_alias(first.uri, "champion", why="test", who="test")
    assert {role: each.uri for role, each in contestants(judged, None).items()} == {
        "start": first.uri, "ppo": second.uri, "champion": first.uri,
    }  # fmt: skip


def test_no_judges_process_outlives_its_evaluation(context: Context, policy: Parent) -> None:
    known = {"problems": "x.jsonl", "verifier": "gsm8k_reward_fn"}
    before = psutil.Process().children(recursive=True)  # such as a server that other tests share
    evaluate_policy.fn(config(**known), policy, dataset(context, CLOSED))
    with pytest.raises(ConfigError, match="no reward model was given"):
        evaluate_policy.fn(config("reward_model", **known), policy, dataset(context, CLOSED))
    with pytest.raises(DataError, match="has none"):
        evaluate_policy.fn(config(**known), policy, dataset(context, OPEN))
    assert not set(psutil.Process().children(recursive=True)) - set(before)


def test_an_evaluation_without_a_judge_is_refused_in_a_sentence(context: Context, policy: Parent) -> None:
    data = dataset(context, OPEN)
    with pytest.raises(ConfigError, match=r"evaluation.judge is verifier, but the data has no answers"):
        evaluate_policy.fn(config(prompts="x.jsonl"), policy, data)
    with pytest.raises(ConfigError, match=r"evaluation.judge is reward_model, but no reward model was given"):
        evaluate_policy.fn(config("reward_model", prompts="x.jsonl"), policy, data)
    with pytest.raises(DataError, match="verifier exact compares with a right answer, and the prompt that begins 'Why"):
        evaluate_policy.fn(config(problems="x.jsonl"), policy, data)


def test_the_judge_is_the_one_that_is_named_and_none_where_the_verifier_judges(
    context: Context, tmp_path: Path
) -> None:
    one = scorer(context, tmp_path / "one")
    assert find_judge.fn(config("reward_model", prompts="x.jsonl"), one.uri) == one
    assert find_judge.fn(config(problems="x.jsonl"), one.uri) is None


def test_a_base_that_is_changed_while_it_answers_leaves_no_evaluation(
    context: Context, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters that answer, too, are over it: so it is mapped."""
    base = Parent(uri="model/tiny", digest=model_digest(model), path=str(model))
    given = config(problems="x.jsonl").model_copy(update={"model": ModelConfig(path=str(model))})
    over = context.store.commit(
        "policy", "p", {"base.json": f'{{"uri": "{base.uri}", "digest": "{base.digest}"}}'.encode()}
    )
    beside = Parent(uri=over.uri, digest=over.digest)
    data = dataset(context, CLOSED)
    evaluate_policy.fn(given, base, data)
    assert not copies_of(base.digest, context.settings.models_dir), "nothing is over it"
    known = evaluation.evaluate_policy

    def changed(*args: Any, **options: Any) -> Any:
        found = known(*args, **options)
        [copy] = copies_of(base.digest, context.settings.models_dir)
        os.utime(copy.directory / WEIGHTS, (1, 1))
        return found

    monkeypatch.setattr(evaluation, "evaluate_policy", changed)
    with pytest.raises(BaseChangedError, match="was changed or removed"):
        evaluate_policy.fn(given, base, data, beside=beside)
    assert len(context.store.list("evaluation", "test")) == 1

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from math import sqrt

import pytest

from infra.artifacts import open_default_store
from rlhf_core.config import DataConfig, GateConfig, PipelineConfig
from rlhf_core.errors import ConfigError
from rlhf_core.evaluation import Outcome, outcomes_to_jsonl
from tasks.promote import gate, promote
from tasks.results import Decision, StageResult

Evaluation = Callable[..., StageResult]


@pytest.fixture
def evaluation() -> Evaluation:
    def make(policy: str, marks: str, scores: list[float] | None = None, judge: str = "exact") -> StageResult:
        """`marks`: one letter a problem, R right and W wrong; a score beside each where they are given."""
        outcomes = [
            Outcome(
                key=str(index),
                prompt="p",
                answer="a",
                response="r",
                correct=mark == "R",
                well_formed=True,
                truncated=False,
                score=float(mark == "R") if scores is None else scores[index],
            )
            for index, mark in enumerate(marks)
        ]
        reference = open_default_store().commit("evaluation", "test", {"outcomes.jsonl": outcomes_to_jsonl(outcomes)})
        return StageResult(
            stage="evaluate",
            uri=reference.uri,
            digest=reference.digest,
            reused=False,
            seconds=0,
            metrics={"policy": policy, "policy_digest": policy, "judge": judge},
        )

    return make


def config(min_gain: float = 0.0) -> PipelineConfig:
    return PipelineConfig(name="test", data=DataConfig(task="gcd"), gate=GateConfig(min_gain=min_gain))


def test_a_policy_that_gains_enough_is_promoted_with_its_paired_interval(evaluation: Evaluation) -> None:
    decision = gate.fn(
        config(),
        {"sft": evaluation("sft/test@1", "W" * 10 + "R" * 10), "ppo": evaluation("policy/test@1", "R" * 20)},
    )
    # ten differences of 1 and ten of 0: mean 0.5, sum of squared deviations 20 * 0.25 = 5
    half = 1.959964 * sqrt(5 / 19 / 20)
    assert decision.promote
    assert decision.difference == pytest.approx(0.5)
    assert (decision.low, decision.high) == (pytest.approx(0.5 - half, abs=1e-5), pytest.approx(0.5 + half, abs=1e-5))


def test_scores_count_where_a_reward_model_judged_and_only_right_answers_where_a_verifier_did(
    evaluation: Evaluation,
) -> None:
    before, after = [0.0, 1.25, -1.0], [0.5, 1.0, -0.5]

    def compared(judge: str) -> Decision:
        sft, ppo = evaluation("sft/test@1", "WWR", before, judge), evaluation("policy/test@1", "WRR", after, judge)
        return gate.fn(config(), {"sft": sft, "ppo": ppo})

    # scores: +0.5, -0.25, +0.5, so mean 0.25 and standard error 0.25; marks: 0, 1, 0, so mean 1/3 and error 1/3
    by_model, by_verifier = compared("reward_model"), compared("gsm8k_reward_fn")
    assert (by_model.difference, by_model.high) == (0.25, pytest.approx(0.25 + 1.959964 * 0.25, abs=1e-5))
    assert "standard deviations of the reward model's score on the same 3 problems" in by_model.reason
    assert by_verifier.difference == pytest.approx(1 / 3)
    assert by_verifier.high == pytest.approx(1 / 3 + 1.959964 / 3, abs=1e-5)
    assert "right on the same 3 problems" in by_verifier.reason


def test_a_gain_below_the_gate_is_not_enough(evaluation: Evaluation) -> None:
    evaluations = {"sft": evaluation("sft/test@1", "W" * 10 + "R" * 10), "ppo": evaluation("policy/test@1", "R" * 20)}
    assert not gate.fn(config(min_gain=0.4), evaluations).promote


def test_the_champion_is_who_must_be_beaten(evaluation: Evaluation) -> None:
    decision = gate.fn(
        config(),
        {
            "sft": evaluation("sft/test@1", "W" * 20),
            "ppo": evaluation("policy/test@2", "R" * 10 + "W" * 10),
            "champion": evaluation("policy/test@1", "R" * 20),
        },
    )
    assert not decision.promote
    assert decision.incumbent == "policy/test@1"
    assert decision.difference == pytest.approx(-0.5)


def test_a_policy_that_went_on_from_another_must_beat_that_one(evaluation: Evaluation) -> None:
    roles = {"base": evaluation("model/test", "W" * 10), "start": evaluation("policy/test@1", "R" * 10)}
    decision = gate.fn(config(), {**roles, "ppo": evaluation("policy/test@2", "R" * 9 + "W")})
    assert (decision.incumbent, decision.champion, decision.promote) == ("policy/test@1", None, False)


def test_a_policy_of_unknown_descent_is_refused_in_a_sentence(evaluation: Evaluation) -> None:
    with pytest.raises(
        ConfigError, match=r"nothing to compare policy/test@1 with: no champion, .*run with the `model`"
    ):
        gate.fn(config(), {"ppo": evaluation("policy/test@1", "RR")})


def test_weights_that_ppo_left_as_they_were_are_not_called_a_champion(evaluation: Evaluation) -> None:
    sft, ppo = evaluation("sft/test@1", "RW"), evaluation("policy/test@1", "RW")
    ppo = ppo.model_copy(update={"metrics": {**ppo.metrics, "policy_digest": "sft/test@1"}})
    decision = gate.fn(config(), {"sft": sft, "ppo": ppo})
    assert decision.reason == "policy/test@1 holds the very weights of sft/test@1 (sft)"
    assert not decision.promote


def test_a_champion_is_not_compared_with_itself(evaluation: Evaluation) -> None:
    same = evaluation("policy/test@1", "R" * 5)
    decision = gate.fn(config(), {"sft": evaluation("sft/test@1", "W" * 5), "ppo": same, "champion": same})
    assert not decision.promote
    assert decision.reason == "policy/test@1 is the champion already"


def test_a_run_that_comes_after_one_that_died_before_its_report_says_who_made_the_champion(
    evaluation: Evaluation,
) -> None:
    store = open_default_store()
    policy = store.commit("policy", "test", {"x": b"1"})
    store.set_alias(policy.uri, "champion", why="+0.5 on 5 problems", who="run 1", expected=None)
    same = evaluation(policy.uri, "RRRRR")
    decision = gate.fn(config(), {"sft": evaluation("sft/test@1", "W" * 5), "ppo": same, "champion": same})
    assert decision.reason.startswith(f"{policy.uri} is the champion already, since {datetime.now(UTC):%Y-%m-%d} ")
    assert decision.reason.endswith(" UTC (run 1: +0.5 on 5 problems)")


def test_promotion_moves_the_champion_and_says_why(evaluation: Evaluation) -> None:
    store = open_default_store()
    policy = store.commit("policy", "test", {"x": b"1"})
    evaluations = {"sft": evaluation("sft/test@1", "WWWWR"), "ppo": evaluation(policy.uri, "RRRRR")}
    decision = gate.fn(config(), evaluations)
    assert promote.fn(decision) == policy.uri
    assert store.resolve("policy/test@champion").ref == policy


def test_a_refusal_leaves_the_champion_where_it_was(evaluation: Evaluation) -> None:
    store = open_default_store()
    old, new = (store.commit("policy", "test", {"x": body}) for body in (b"1", b"2"))
    store.set_alias(old.uri, "champion", why="test", who="test")
    evaluations = {"champion": evaluation(old.uri, "RRRRR"), "ppo": evaluation(new.uri, "WWWWW")}
    assert promote.fn(gate.fn(config(), evaluations)) == old.uri

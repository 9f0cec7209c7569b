from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from infra.artifacts import open_default_store
from infra.errors import ReferenceNotFoundError
from rlhf_core.config import DataConfig, GateConfig, PipelineConfig, PPOConfig
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.evaluation import Outcome, outcomes_to_jsonl
from tasks import context as contexts
from tasks.challenger import open_challenge
from tasks.error_budget import next_level, power_sentence, spend, tell_power
from tasks.promote import gate, promote
from tasks.results import Decision, Parent, StageResult
from tasks.stages import stage_result
from tests.unit.artifacts.store_contract import at_once

Evaluation = Callable[..., StageResult]


@pytest.fixture
def evaluation() -> Evaluation:
    def make(
        policy: str,
        marks: str,
        scores: list[float] | None = None,
        judge: str = "exact",
        first: int = 0,
        responses: list[str] | None = None,
    ) -> StageResult:
        """`marks`: one letter a problem, R right, W wrong, U unknown; a score beside each where they are given."""
        outcomes = [
            Outcome(
                key=f"{first + index}",
                prompt="p",
                answer="a",
                response="r" if responses is None else responses[index],
                correct=mark == "R",
                well_formed=True,
                truncated=False,
                score=float(mark == "R") if scores is None else scores[index],
                failure="died: it ended its process (SIGKILL)" if mark == "U" else "",
            )
            for index, mark in enumerate(marks)
        ]
        store = open_default_store()
        try:
            digest = store.resolve(policy).digest if policy.startswith("policy/") else policy
        except ReferenceNotFoundError:
            digest = store.commit("policy", "test", {"x": policy.encode()}, version=int(policy[-1])).digest
        metrics = {"policy": policy, "policy_digest": digest, "judge": judge}
        files = {"outcomes.jsonl": outcomes_to_jsonl(outcomes)}
        made = store.commit("evaluation", "test", files, metrics=metrics, config={"of": policy, "by": judge})
        return stage_result("evaluate", store.resolve(made), reused=False)

    return make


def config(min_gain: float = 0.0, **gate: Any) -> PipelineConfig:
    """A gate that few problems pass: of one night a year, whose test has half of 0.05 (the other half is kept)."""
    rules = GateConfig.model_validate({"min_gain": min_gain, "nights_a_year": 1, **gate})
    return PipelineConfig(name="test", data=DataConfig(task="gcd"), gate=rules)


def rotating() -> PipelineConfig:
    """A gate with a challenger: a night has 0.0075, each of a candidate's three tests 0.0025."""
    rules = GateConfig(year_error=0.3, nights_a_year=40)
    return PipelineConfig(name="test", data=DataConfig(task="gcd", rotate_evaluation=True), gate=rules)


def test_a_policy_that_gains_enough_is_promoted_with_its_exact_test(evaluation: Evaluation) -> None:
    decision = gate.fn(
        config(),
        {"sft": evaluation("sft/test@1", "W" * 10 + "R" * 10), "ppo": evaluation("policy/test@1", "R" * 20)},
    )
    # ten wins of ten differences: 1 / 2^10
    assert decision.promote
    assert decision.difference == pytest.approx(0.5)
    assert (decision.wins, decision.losses, decision.p_value, decision.level) == (10, 0, 1 / 1024, 0.025)
    assert decision.reason == (
        "policy/test@1 against sft/test@1 (sft): +0.500 [+0.275, +0.725] right, 10 better and 0 worse of 20 problems, "
        "p = 0.00098 (0.025 needed)"
    )


def test_four_wins_to_none_are_not_enough_for_a_year_of_nights(evaluation: Evaluation) -> None:
    sft, ppo = evaluation("sft/test@1", "WWWW" + "R" * 6), evaluation("policy/test@1", "R" * 10)
    # p = 1 / 2^4; that happens by chance in one of sixteen nights on which four answers change
    decision = gate.fn(config(nights_a_year=365), {"sft": sft, "ppo": ppo})
    assert (decision.promote, decision.p_value, decision.level) == (False, 1 / 16, pytest.approx(0.05 / 365))


def test_scores_count_where_a_reward_model_judged_and_only_right_answers_where_a_verifier_did(
    evaluation: Evaluation,
) -> None:
    before, after = [0.0, 1.25, -1.0], [0.5, 1.0, -0.5]

    def compared(judge: str) -> Decision:
        sft, ppo = evaluation("sft/test@1", "WWR", before, judge), evaluation("policy/test@1", "WRR", after, judge)
        return gate.fn(config(), {"sft": sft, "ppo": ppo})

    # scores: +0.5, -0.25, +0.5, so mean 0.25; two of three better: (1 + 3) / 2^3. Marks: 0, 1, 0
    by_model, by_verifier = compared("reward_model"), compared("gsm8k_reward_fn")
    assert (by_model.difference, by_model.wins, by_model.losses, by_model.p_value) == (0.25, 2, 1, 0.5)
    assert (
        "+0.250 [-0.240, +0.740] standard deviations of the reward model's score, 2 better and 1 worse of 3"
        in by_model.reason
    )
    assert by_verifier.difference == pytest.approx(1 / 3)
    assert (by_verifier.wins, by_verifier.losses, by_verifier.p_value) == (1, 0, 0.5)
    assert "+0.333 [-0.320, +0.987] right, 1 better and 0 worse of 3 problems" in by_verifier.reason


def test_a_least_gain_in_scores_is_won_by_more_than_it_on_most_problems(evaluation: Evaluation) -> None:
    sft = evaluation("sft/test@1", "W" * 10, [0.0] * 10, "reward_model")
    ppo = evaluation("policy/test@1", "W" * 10, [0.4] * 9 + [0.2], "reward_model")
    # nine by more than 0.3, one by less: p = 11 / 1024; the mean is 0.38
    assert gate.fn(config(min_gain=0.3), {"sft": sft, "ppo": ppo}).promote
    assert not gate.fn(config(min_gain=0.39), {"sft": sft, "ppo": ppo}).promote


def test_many_small_wins_do_not_make_up_for_heavy_losses(evaluation: Evaluation) -> None:
    sft = evaluation("sft/test@1", "W" * 10, [0.0] * 10, "reward_model")
    ppo = evaluation("policy/test@1", "W" * 10, [0.1] * 9 + [-5.0], "reward_model")
    # nine better and one worse: p = 11 / 1024, below 0.025; but on average it is 0.41 worse
    decision = gate.fn(config(), {"sft": sft, "ppo": ppo})
    assert (decision.promote, decision.p_value) == (False, 11 / 1024)


def test_problems_are_compared_that_were_judged_for_both(evaluation: Evaluation) -> None:
    sft, ppo = evaluation("sft/test@1", "WWRUWU"), evaluation("policy/test@1", "RWRRUU")
    decision = gate.fn(config(), {"sft": sft, "ppo": ppo})
    assert decision.difference == pytest.approx(1 / 3)  # 1, 0 and 0, of the first three
    assert "right, 1 better and 0 worse of 3 problems" in decision.reason
    with pytest.raises(DataError, match=r"only 1 problem has a verdict for both .*; repair the judge"):
        gate.fn(config(), {"sft": evaluation("sft/test@1", "RUU"), "ppo": evaluation("policy/test@1", "RRU")})


def test_a_gain_below_the_gate_is_not_enough(evaluation: Evaluation) -> None:
    evaluations = {"sft": evaluation("sft/test@1", "W" * 10 + "R" * 10), "ppo": evaluation("policy/test@1", "R" * 20)}
    assert not gate.fn(config(min_gain=0.4), evaluations).promote


def test_the_champion_is_who_must_be_beaten(evaluation: Evaluation) -> None:
    decision = gate.fn(
        config(),
        {
            "sft": evaluation("sft/test@1", "W" * 20),
            "champion": evaluation("policy/test@1", "R" * 20),
            "ppo": evaluation("policy/test@2", "R" * 10 + "W" * 10),
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
    evaluations = {"sft": evaluation("sft/test@1", "WWWWWWR"), "ppo": evaluation(policy.uri, "RRRRRRR")}
    decision = gate.fn(config(), evaluations)
    assert promote.fn(decision) == policy.uri
    assert store.resolve("policy/test@champion").ref == policy


def test_a_refusal_leaves_the_champion_where_it_was(evaluation: Evaluation) -> None:
    store = open_default_store()
    old, new = (store.commit("policy", "test", {"x": body}) for body in (b"1", b"2"))
    store.set_alias(old.uri, "champion", why="test", who="test")
    evaluations = {"champion": evaluation(old.uri, "RRRRR"), "ppo": evaluation(new.uri, "WWWWW")}
    assert promote.fn(gate.fn(config(), evaluations)) == old.uri


@pytest.fixture
def as_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes this process the one of a run."""
    return lambda run: monkeypatch.setattr(contexts, "root_flow_run", lambda: run)


class TestBudget:
    """Each comparison spends of the year's error, and a run spends once."""

    def test_every_comparison_has_what_those_before_it_left(self, evaluation: Evaluation) -> None:
        sft, store = evaluation("sft/test@1", "WR"), open_default_store()
        found = [gate.fn(config(), {"sft": sft, "ppo": evaluation(f"policy/test@{n}", "RR")}).level for n in (1, 2, 3)]
        assert found == pytest.approx([0.025, 0.0125, 0.00625])  # half of what is left
        assert len(store.aliases("policy", "test")["judged"].history) == 3
        assert next_level(contexts.open_context(), "test", config().gate) == pytest.approx(0.003125)
        assert next_level(contexts.open_context(), "another", config().gate) == 0.025

    def test_a_run_that_is_started_again_spends_once_and_decides_the_same(
        self, evaluation: Evaluation, as_run: Any
    ) -> None:
        evaluations = {"sft": evaluation("sft/test@1", "W" * 7), "ppo": evaluation("policy/test@1", "R" * 7)}
        as_run("one")
        first = gate.fn(config(), evaluations)
        promote.fn(first)
        as_run("two")
        assert gate.fn(config(), evaluations).level == 0.0125
        as_run("one")
        assert gate.fn(config(), evaluations) == first
        assert len(open_default_store().aliases("policy", "test")["judged"].history) == 2

    def test_a_run_that_died_between_its_entry_and_its_decision_finds_its_level(
        self, evaluation: Evaluation, as_run: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        evaluations = {"sft": evaluation("sft/test@1", "W" * 7), "ppo": evaluation("policy/test@1", "R" * 7)}
        as_run("one")
        with monkeypatch.context() as killed:
            killed.setattr("tasks.promote.judge", lambda *_, **__: pytest.exit)
            with pytest.raises(AttributeError):
                gate.fn(config(), evaluations)
        as_run("two")
        gate.fn(config(), evaluations)
        as_run("one")
        assert gate.fn(config(), evaluations).level == 0.025

    def test_of_many_that_are_judged_at_once_each_has_a_level_of_its_own(self, evaluation: Evaluation) -> None:
        evaluation("policy/test@1", "RR")
        here, rules = contexts.open_context(), config().gate
        at_once_found = at_once(lambda n: spend(replace(here, flow_run=f"run-{n}"), "policy/test@1", rules), 4)
        assert sorted(at_once_found, reverse=True) == pytest.approx([0.025, 0.0125, 0.00625, 0.003125])

    def test_what_was_never_compared_costs_nothing(self, evaluation: Evaluation) -> None:
        same = evaluation("policy/test@1", "RR")
        gate.fn(config(), {"champion": same, "ppo": same})
        assert "judged" not in open_default_store().aliases("policy", "test")


class TestChallenger:
    """A candidate that may pass with more problems waits for them, against the same champion."""

    def night(self, evaluation: Evaluation, new: str, marks: str, first: int, **roles: str) -> Decision:
        """Let a candidate meet the champion, which is right on no problem, on problems from `first` on."""
        champion = evaluation("policy/test@1", "W" * len(marks), first=first)
        beside = {role: evaluation(*given.split(), first=first) for role, given in roles.items()}
        ppo = evaluation(new, marks, first=first)
        decision = gate.fn(rotating(), {"champion": champion, **beside, "ppo": ppo})
        promote.fn(decision)
        return decision

    @pytest.fixture(autouse=True)
    def _champion(self, evaluation: Evaluation) -> None:
        evaluation("policy/test@1", "R")
        open_default_store().set_alias("policy/test@1", "champion", why="", who="")

    def test_it_is_promoted_by_the_problems_of_two_nights(self, evaluation: Evaluation) -> None:
        first = self.night(evaluation, "policy/test@2", "R" * 6 + "W" * 4, 0)
        assert (first.promote, first.p_value) == (False, 1 / 64)  # 0.016, above 0.0025
        assert first.reason.endswith("(0.0025 needed); policy/test@2 is the challenger (night 1 of 3)")
        store = open_default_store()
        assert store.alias("policy", "test", "challenger") == "policy/test@2"
        second = self.night(evaluation, "policy/test@3", "W" * 10, 10, challenger="policy/test@2 RRRRRWWWWW")
        # eleven wins of twenty problems: 1 / 2^11 = 0.0005
        assert (second.promote, second.policy, second.p_value, second.level) == (True, "policy/test@2", 2**-11, 0.0025)
        assert second.reason == (
            "policy/test@2 against policy/test@1 (champion): +0.550 [+0.326, +0.774] right, 11 better and 0 worse of "
            "20 problems in 2 nights, p = 0.00049 (0.0025 needed); the candidate policy/test@3: +0.000 "
            "[+0.000, +0.000] right, 0 better and 0 worse of 10 problems, p = 1 (0.0025 needed)"
        )
        assert store.alias("policy", "test", "champion") == "policy/test@2"
        assert not store.aliases("policy", "test")["challenger"].history[-1].facts["is_open"]

    def test_a_problem_that_comes_again_counts_once(self, evaluation: Evaluation) -> None:
        self.night(evaluation, "policy/test@2", "R" * 6 + "W" * 4, 0)
        again = self.night(evaluation, "policy/test@3", "W" * 10, 0, challenger="policy/test@2 RRRRRRWWWW")
        assert not again.promote
        assert (
            "the challenger policy/test@2: +0.600 [+0.280, +0.920] right, "
            "6 better and 0 worse of 10 problems in 2 nights" in again.reason
        )
        assert again.reason.endswith("policy/test@2 challenges no longer")  # a third night would bring nothing new

    def test_it_ends_after_three_nights(self, evaluation: Evaluation) -> None:
        self.night(evaluation, "policy/test@2", "R" * 5 + "W" * 45, 0)
        second = self.night(evaluation, "policy/test@3", "W" * 50, 50, challenger="policy/test@2 R" + "W" * 49)
        assert second.reason.endswith("policy/test@2 is the challenger (night 2 of 3)")
        third = self.night(evaluation, "policy/test@4", "W" * 50, 100, challenger="policy/test@2 " + "W" * 50)
        assert third.reason.endswith("policy/test@2 challenges no longer")
        assert self.waiting("policy/test@5") is None

    def waiting(self, candidate: str) -> str | None:
        """Return who would be evaluated beside a candidate tonight."""
        store = open_default_store()
        crowned = store.resolve("policy/test@champion")
        champion, new = Parent(uri=crowned.uri, digest=crowned.digest), Parent(uri=candidate, digest="d")
        found = open_challenge(contexts.open_context(), "test", champion, new)
        return found and found.policy.uri

    def test_another_champion_ends_the_challenge(self, evaluation: Evaluation) -> None:
        self.night(evaluation, "policy/test@2", "R" * 6 + "W" * 4, 0)
        assert self.waiting("policy/test@3") == "policy/test@2"
        evaluation("policy/test@4", "R")
        store = open_default_store()
        store.promote("policy/test@4", why="a person knows better", who="a person")
        assert self.waiting("policy/test@3") is None
        store.rollback("policy", "test", why="not better", who="a person")
        assert self.waiting("policy/test@3") == "policy/test@2"

    def test_of_two_that_pass_the_better_is_promoted_and_the_challenge_ends(self, evaluation: Evaluation) -> None:
        self.night(evaluation, "policy/test@2", "R" * 6 + "W" * 4, 0)
        both = self.night(evaluation, "policy/test@3", "R" * 10, 10, challenger="policy/test@2 RRRRRWWWWW")
        assert (both.promote, both.policy) == (True, "policy/test@3")  # ten of ten against eleven of twenty
        assert self.waiting("policy/test@4") is None

    def test_a_run_that_is_started_again_after_its_promotion_decides_the_same(
        self, evaluation: Evaluation, as_run: Any
    ) -> None:
        as_run("one")
        self.night(evaluation, "policy/test@2", "R" * 6 + "W" * 4, 0)
        as_run("two")
        night = ("policy/test@3", "W" * 10, 10)
        first = self.night(evaluation, *night, challenger="policy/test@2 RRRRRWWWWW")
        history = open_default_store().aliases("policy", "test")
        assert self.night(evaluation, *night, challenger="policy/test@2 RRRRRWWWWW") == first
        assert open_default_store().aliases("policy", "test") == history

    def test_another_judge_ends_the_challenge_for_good(self, evaluation: Evaluation) -> None:
        self.night(evaluation, "policy/test@2", "R" * 6 + "W" * 4, 0)
        scores = [0.0] * 10
        roles = {
            "champion": evaluation("policy/test@1", "W" * 10, scores, "gsm8k_reward_fn", 10),
            "challenger": evaluation("policy/test@2", "W" * 10, scores, "gsm8k_reward_fn", 10),
            "ppo": evaluation("policy/test@3", "W" * 10, scores, "gsm8k_reward_fn", 10),
        }
        decision = gate.fn(config(nights_a_year=10), roles)
        promote.fn(decision)
        assert decision.reason.endswith("policy/test@2 challenges no longer")
        assert self.waiting("policy/test@4") is None

    def test_more_nights_by_a_later_configuration_are_not_for_who_waits_already(self, evaluation: Evaluation) -> None:
        first = self.night(evaluation, "policy/test@2", "R" * 5 + "W" * 45, 0)
        assert first.challenge is not None
        assert first.challenge.most_nights == 3
        champion, asked, new = (
            evaluation(policy, marks, first=50)
            for policy, marks in (
                ("policy/test@1", "W" * 50),
                ("policy/test@2", "RR" + "W" * 48),
                ("policy/test@3", "W" * 50),
            )
        )
        gate_now = rotating().gate.model_copy(update={"challenger_nights": 10})
        later = gate.fn(
            rotating().model_copy(update={"gate": gate_now}), {"champion": champion, "challenger": asked, "ppo": new}
        )
        assert later.reason.endswith("policy/test@2 is the challenger (night 2 of 3)")

    def test_without_new_problems_to_come_nobody_waits(self, evaluation: Evaluation) -> None:
        unmoved = config(nights_a_year=10)
        roles = {
            "champion": evaluation("policy/test@1", "W" * 10),
            "ppo": evaluation("policy/test@2", "R" * 6 + "WWWW"),
        }
        assert gate.fn(unmoved, roles).challenge is None


def test_a_night_is_told_before_what_its_problems_can_show() -> None:
    level = 0.05 / 365  # 0.000137: 1 / 2^12 is above, 1 / 2^13 below
    assert power_sentence(200, level, nights=1) == (
        "200 held-out problems show a gain of 0.17 or more with 80% probability, where the policies differ on 30% of "
        "them (p of 0.00014 is needed); +0.08 needs 938"
    )
    assert power_sentence(12, level, nights=1) == (
        "12 held-out problems are too few for this gate: even if all of them were better, p would be 0.00024, and "
        "0.00014 is needed; it can promote nothing. Raise data.splits.evaluation, or lower gate.nights_a_year"
    )
    assert power_sentence(12, level, nights=3).endswith(
        "only a challenger can pass, with the problems of several nights"
    )
    assert "too few" not in power_sentence(13, level, nights=1)


def test_a_night_is_told_too_what_shows_a_gain_above_a_least_one() -> None:
    level = 0.05 / 365
    told = power_sentence(200, level, nights=3, min_gain=0.05)
    assert told == (
        "200 held-out problems show a gain of 0.26 or more to be above gate.min_gain = 0.05 with 80% probability, "
        "where the policies differ on 30% of them (p of 0.00014 is needed)"
    )
    assert "no gain below 0.3 to be above gate.min_gain = 0.2" in power_sentence(200, level, nights=1, min_gain=0.2)
    few = power_sentence(14, level, nights=1, min_gain=0.05)  # 2 * (1.05 / 2)^14
    assert "p would be 0.00024, and 0.00014 is needed; it can promote nothing" in few
    assert few.endswith("or lower gate.min_gain or gate.nights_a_year")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gate": {"min_gain": 0.05}}, "to be above gate.min_gain = 0.05 with 80% probability, where the policies dif"),
        ({"gate": {"min_gain": 0.05}, "evaluation": {"judge": "reward_model"}}, "; better is by more than gate.min_ga"),
    ],
    ids=["answers", "scores"],
)
def test_every_night_with_problems_is_told_before(
    store: ArtifactStore, changes: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    del store  # its ledger has no comparison yet
    night = PipelineConfig.model_validate({**config().model_dump(), **changes})
    dataset = StageResult(
        stage="data", uri="", digest="", reused=False, seconds=0, metrics={"problems_evaluation": 200}
    )
    tell_power(night, dataset)
    assert said in caplog.messages[-1]


def test_a_policy_that_gains_is_refused_for_what_else_it_lost_with_figure_and_threshold(
    evaluation: Evaluation, caplog: pytest.LogCaptureFixture
) -> None:
    sft = evaluation("sft/test@1", "W" * 60)
    ppo = evaluation("policy/test@1", "R" * 60, responses=["r"] * 40 + [""] * 20)
    decision = gate.fn(config(), {"sft": sft, "ppo": ppo})
    assert decision.difference == 1.0
    assert not decision.promote
    # twenty of sixty are empty, none before
    assert "empty answers: 0.333, at most 0.01 is asked (rise of the share: 0.333 after 0.000)" in decision.reason
    assert decision.reason in caplog.messages[-1]
    assert [each.name for each in decision.conditions if not each.holds] == ["empty answers"]
    again = Decision.model_validate_json(decision.model_dump_json())
    assert again == decision


def test_a_condition_that_is_switched_off_asks_nothing(evaluation: Evaluation) -> None:
    sft = evaluation("sft/test@1", "W" * 60)
    ppo = evaluation("policy/test@1", "R" * 60, responses=["r"] * 40 + [""] * 20)
    off = config().model_copy(update={"gate": GateConfig.model_validate({"conditions": {"empty": None}})})
    decision = gate.fn(off, {"sft": sft, "ppo": ppo})
    assert decision.promote
    assert "empty answers" not in {each.name for each in decision.conditions}


def test_the_figures_of_the_policys_run_and_of_its_reward_model_count(evaluation: Evaluation) -> None:
    store = open_default_store()
    scorer = store.commit("reward-model", "test", {"x": b"1"}, metrics={"accuracy": 0.45, "heldout_pairs": 20})
    figures = {"last_kl": 45.0, "last_length": 15.0}
    policy = store.commit("policy", "test", {"x": b"2"}, parents=[scorer], metrics=figures)
    paid = config().model_copy(update={"ppo": PPOConfig.model_validate({"reward": {"reward_model": 1.0}})})
    evaluations = {"sft": evaluation("sft/test@1", "W" * 20), "ppo": evaluation(policy.uri, "R" * 20)}
    decision = gate.fn(paid, evaluations)
    broken = {each.name: each.figure for each in decision.conditions if not each.holds}
    assert broken == {"KL per token": 3.0, "reward model's accuracy": 0.45}
    assert not decision.promote

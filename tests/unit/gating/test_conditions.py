"""The side conditions: each figure by hand, what is not measured, and what is planted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.gate_conditions import REGRESSIONS, Regression, broken, equal_pair, planted
from rlhf_core.config import ConditionsConfig
from rlhf_core.evaluation import Outcome
from rlhf_core.forgetting.measures import TEXT, Measure, measures_from_jsonl, measures_to_jsonl
from rlhf_core.gating.conditions import Compared, Condition, Known, side_conditions


def outcomes(count: int = 40, **fields: Any) -> list[Outcome]:
    plain = Outcome("", "What is it, this time?", "a", "r", False, True, False, 0.0, tokens=10)
    return [replace(plain, key=str(number), **fields) for number in range(count)]


def found(compared: Compared, **thresholds: Any) -> dict[str, Condition]:
    config = ConditionsConfig.model_validate(thresholds)
    return {each.name: each for each in side_conditions(compared, config)}


def of_both(before: list[Outcome], after: list[Outcome], **known: Any) -> Compared:
    return Compared(Known(before), Known(after), **known)


def test_length_is_the_ratio_of_means_in_tokens_or_in_characters_where_a_side_did_not_count_them() -> None:
    one = found(of_both(outcomes(), outcomes(tokens=25)))["length"]
    assert (one.figure, one.threshold, one.holds) == (2.5, 1.5, False)
    assert one.told == "times the incumbent's mean: 25.0 tokens after 10.0"
    old = found(of_both(outcomes(tokens=None, response="ab"), outcomes(response="abc")))["length"]
    assert (old.figure, old.holds) == (1.5, True)  # not beyond
    assert "3.0 characters after 2.0" in old.told


def test_two_long_answers_of_many_are_chance_and_the_condition_says_so() -> None:
    after = outcomes(38) + [replace(each, key=f"{38 + place}", tokens=500) for place, each in enumerate(outcomes(2))]
    length = found(of_both(outcomes(), after))["length"]
    assert length.figure == pytest.approx((38 * 10 + 2 * 500) / 400)
    assert length.holds
    assert length.told.endswith("beyond what is asked, as chance alone may do")


def test_a_category_that_lost_is_named_though_another_gained_more() -> None:
    def answers(right: dict[str, int]) -> list[Outcome]:
        return [
            replace(each, key=f"{category}{each.key}", category=category, correct=place < count)
            for category, count in right.items()
            for place, each in enumerate(outcomes())
        ]

    compared = of_both(answers({"sums": 30, "words": 5}), answers({"sums": 10, "words": 38}))
    condition = found(compared)["a category"]
    assert (condition.figure, condition.holds) == (0.5, False)  # 20 of 40 lost
    assert condition.told == "loss of sums on 40 problems, of 2 categories"
    assert found(of_both(outcomes(), outcomes()))["a category"].told == "not measured: the problems are of no category"


def test_where_a_reward_model_judged_its_scores_count_by_category_and_form_does_not() -> None:
    before = [replace(each, category="ab"[int(each.key) % 2]) for each in outcomes()]
    after = [replace(each, score=-0.5 if each.category == "a" else 2.0) for each in before]
    conditions = found(of_both(before, after, by_score=True))
    assert (conditions["a category"].figure, conditions["a category"].holds) == (0.5, False)
    assert "malformed" not in conditions


def test_what_was_paid_may_not_rise_while_what_is_verified_falls() -> None:
    stored = {"first_score": 0.0, "last_score": 0.5, "first_verifier": 0.5, "last_verifier": 0.4}
    spread = {f"{end}_{name}": value for end in ("first", "last") for name, value in
              (("score_std", 1.0), ("verifier_std", 0.5), ("samples", 400))}  # fmt: skip
    fell = found(of_both([], [], ppo={**stored, **spread}))["verified reward"]
    # standard error of the fall: 0.5 * sqrt(2 / 400) = 0.035, so 2.8 of them: p = 0.0023
    assert (fell.figure, fell.holds) == (pytest.approx(0.1), False)
    both_fell = found(of_both([], [], ppo={**stored, **spread, "last_score": -0.5}))["verified reward"]
    assert both_fell.holds
    few = {name: 20 if name.endswith("samples") else value for name, value in spread.items()}
    assert found(of_both([], [], ppo={**stored, **few}))["verified reward"].told.endswith("as chance alone may do")
    assert found(of_both([], [], ppo=stored))["verified reward"].figure is None


def test_where_the_best_episode_is_kept_its_figures_count_and_not_the_last_ones() -> None:
    means = {"first_score": 0.0, "last_score": 0.5, "first_verifier": 0.5, "last_verifier": 0.1}
    spread = {f"{end}_{name}_std": 0.1 for end in ("first", "last", "kept") for name in ("score", "verifier")}
    sizes = {f"{end}_samples": 100 for end in ("first", "last")} | {"last_kl": 90.0, "last_length": 10.0}
    last = found(of_both([], [], ppo={**means, **spread, **sizes}))
    assert not last["verified reward"].holds
    assert not last["KL per token"].holds
    kept = {"kept_score": 0.3, "kept_verifier": 0.6, "kept_samples": 100, "kept_kl": 4.0, "kept_length": 10.0}
    best = found(of_both([], [], ppo={**means, **spread, **sizes, **kept}))
    assert best["verified reward"].holds
    assert (best["KL per token"].figure, best["KL per token"].holds) == (0.4, True)


def test_answers_that_nobody_judged_count_for_what_needs_no_verdict() -> None:
    good = outcomes(40, correct=True)
    unjudged = [replace(each, response="", failure="timed out") for each in good[:20]] + good[20:]
    conditions = found(of_both(good, unjudged))
    assert conditions["empty answers"].figure == 0.5
    assert conditions["malformed"].figure == 0.0


def test_forgotten_text_is_a_rise_of_cross_entropy_and_a_suites_loss_a_fall() -> None:
    def known(text: float, right: int) -> Known:
        items = {str(item): float(item < right) for item in range(50)}
        return Known([], {TEXT: Measure(TEXT, {"a": 3.0 + text, "b": 2.0}), "mine": Measure("mine", items)})

    compared = Compared(known(0.0, 40), known(0.8, 10), base=known(-0.6, 0).measures)
    conditions = found(compared, text_loss_from_base=0.3)
    assert (conditions["forgotten text"].figure, conditions["forgotten text"].holds) == (pytest.approx(0.4), False)
    assert conditions["forgotten text, of the base"].figure == pytest.approx(0.7)
    assert (conditions["mine"].figure, conditions["mine"].holds) == (pytest.approx(0.6), False)
    better = found(Compared(known(0.0, 10), known(-0.4, 40)))
    assert better["forgotten text"].holds
    assert better["mine"].holds


def test_what_an_earlier_release_stored_is_not_measured_and_blocks_nothing() -> None:
    old = outcomes(tokens=None)
    conditions = found(of_both(old, [replace(each, correct=True) for each in old]))
    assert all(each.holds for each in conditions.values())
    unmeasured = {name for name, each in conditions.items() if each.figure is None}
    assert unmeasured == {"KL per token", "a category", "reward model's accuracy", "verified reward", "forgotten text"}


def test_null_switches_every_condition_off() -> None:
    off = {name: None for name in ConditionsConfig.model_fields if name != "level"}
    assert found(of_both(outcomes(), outcomes(tokens=99)), **off) == {}


def test_measures_are_read_as_they_were_written() -> None:
    made = [Measure(TEXT, {"p": 2.5}), Measure("questions", {"q": 1.0, "r": 0.0})]
    assert list(measures_from_jsonl(measures_to_jsonl(made)).values()) == made
    assert made[1].mean == 0.5


@pytest.mark.parametrize("regression", planted(), ids=lambda each: each.name)
def test_a_planted_regression_that_wins_the_task_is_refused(regression: Regression) -> None:
    assert regression.gain_p < 0.05 / 365
    assert broken(regression.compared)


def test_there_are_twenty_of_them() -> None:
    assert len(REGRESSIONS) == 20


def test_of_twenty_pairs_of_equal_policies_at_most_one_breaks_a_condition() -> None:
    assert sum(bool(broken(equal_pair(seed))) for seed in range(20)) <= 1

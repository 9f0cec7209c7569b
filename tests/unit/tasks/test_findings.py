"""Why a run learnt little: planted causes are named, healthy runs are not accused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from rlhf_core.gating.conditions import Condition
from rlhf_core.gating.paired_test import sign_test
from rlhf_core.gating.power import power
from tasks.report.findings import _OF_CONDITIONS, RULES, Figures, findings, hacks, learnt_little, refusals
from tasks.results import Challenge, Decision, Parent
from tests.unit.tasks.histories import PLANTED, changed, evaluation, hacked, healthy, little

MADE = 20
_KEY = re.compile(r"\b(?:sft|ppo|data|reward_model|evaluation)\.[a-z_.]+[a-z]")


@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_cause_is_named_with_its_figures_and_with_what_to_change(cause: str) -> None:
    found = [{each.cause: each for each in findings(PLANTED[cause](seed))} for seed in range(MADE)]
    assert sum(cause in each for each in found) >= 0.9 * MADE
    shown = next(each[cause] for each in found if cause in each)
    assert re.search(r"\d", shown.told)
    assert re.search(r"raise|lower", shown.advice)


def test_of_twenty_healthy_runs_at_most_one_is_accused_of_anything() -> None:
    accused = {seed: found for seed in range(MADE) if (found := findings(healthy(seed)))}
    assert len(accused) <= 1, accused


@pytest.mark.parametrize("source", ["reward_model", "mine.rewards:length", "tags"])
def test_a_source_that_rises_while_the_verifiers_score_falls_is_named_and_no_other(source: str) -> None:
    for seed in (1, 2):
        found = hacks(hacked(seed, source).episodes)
        assert [each.source for each in found] == [source]
        assert findings(hacked(seed, source))[0].cause == f"A reward hack: {source}"
        told = findings(hacked(seed, source))[0].told
        assert re.match(r"from episodes [345] to [678] to the last 4, on average, what .* says rose from 0\.", told)


def test_of_planted_hacks_nearly_all_and_of_clean_runs_next_to_none_are_named() -> None:
    named = [bool(hacks(hacked(seed, "reward_model").episodes)) for seed in range(60)]
    assert sum(named) >= 50  # five of six
    clean = [bool(hacks(run.episodes)) for seed in range(100) for run in (healthy(seed), little(seed))]
    assert sum(clean) <= len(clean) // 20


def test_no_hack_is_named_where_nobody_verified_or_too_few_episodes_are_there() -> None:
    rows = hacked(1, "reward_model").episodes
    assert hacks(rows[:5]) == []
    assert hacks([{name: value for name, value in row.items() if name != "raw/verifier"} for row in rows]) == []
    assert hacks([]) == []


def test_a_run_that_learnt_well_is_told_nothing_of_an_idle_critic() -> None:
    idle = changed(replace(little(0), end=evaluation(0.8)), explained_variance=lambda _: 0.0)
    assert not learnt_little(idle)
    assert findings(idle) == []
    assert [each.cause for each in findings(replace(idle, end=evaluation(0.41)))] == ["The critic is idle"]


def test_a_run_of_which_little_is_known_is_told_little() -> None:
    assert findings(Figures()) == []
    row: dict[str, Any] = {"episode": 0, "score": 0.5, "kl": 0.0}
    assert findings(Figures(episodes=[row])) == []


def test_a_start_that_is_never_right_is_told_why_nothing_was_learnt() -> None:
    """Figures of a run on `spell_backward` with 384 demonstrations: SFT 0.005 right, PPO 0.010."""
    none = changed(little(3, 0.005), verifier_std=lambda at: 0.0 if at % 5 else 0.1, explained_variance=lambda _: 0.001)
    causes = [each.cause for each in findings(none)]
    assert causes[0] == "The start solves too little to be paid"
    assert "The critic is idle" in causes
    assert "Episodes without variance" in causes


def test_every_key_that_advice_names_is_a_setting() -> None:
    config = PipelineConfig.model_validate({"name": "a", "data": {"task": "chain_sum"}}).model_dump()
    broken = [Condition(name, 2.0, 1.0, holds=False, told="") for name in ("KL per token", *_OF_CONDITIONS)]
    for advised in (*RULES, *refusals(refused(conditions=broken))):
        for key in _KEY.findall(advised.advice):
            part: Any = config
            for name in key.split("."):
                assert name in part, key
                part = part[name]


def refused(**changed: Any) -> Decision:
    """Return a decision that promotes nothing: 49 wins and 20 losses of 500 problems."""
    known: dict[str, Any] = {
        "promote": False, "reason": "", "policy": "policy/a@2", "incumbent": "policy/a@1", "champion": "policy/a@1",
        "difference": 0.058, "low": 0.02, "high": 0.09, "wins": 49, "losses": 20, "problems": 500,
        "p_value": sign_test(49, 20), "level": 0.05 / 365,
    }  # fmt: skip
    return Decision(**{**known, **changed})


def test_a_gain_that_may_be_chance_is_told_with_how_many_problems_would_show_it() -> None:
    [found] = refusals(refused())
    assert found.cause == "The gain may be chance"
    assert "with a probability of 0.00032; 0.00014 is needed" in found.told
    needed = re.search(r"about ([\d,]+) problems", found.advice)
    assert needed is not None
    problems = int(needed[1].replace(",", ""))
    assert power(problems=problems, gain=29 / 500, differing=69 / 500, level=0.05 / 365) == pytest.approx(0.8, abs=0.05)


def test_a_challenger_is_waited_for() -> None:
    nothing = Parent(uri="policy/a@2", digest="0")
    challenge = Challenge(policy=nothing, against="0", nights=(), level=0.01, most_nights=3, is_open=True)
    assert refusals(refused(challenge=challenge))[0].advice.startswith("wait: ")


def test_what_broke_is_told_with_what_to_change_and_what_was_promoted_with_nothing() -> None:
    broken = Condition("KL per token", 1.234567, 1.0, holds=False, told="25 nats an answer")
    kept = Condition("length", 1.0, 1.5, holds=True, told="")
    [found] = refusals(refused(conditions=(broken, kept), p_value=1e-5))
    assert (found.cause, found.told) == ("KL per token broke", "1.23, at most 1 is asked (25 nats an answer)")
    assert found.advice == "raise ppo.kl_coef, or lower ppo.lr"
    assert (
        refusals(refused(promote=True)) == refusals(refused(difference=-0.1)) == refusals(refused(p_value=None)) == []
    )


def test_a_hack_says_whether_the_kept_episode_lies_before_it() -> None:
    run = hacked(1, "tags")
    measured = replace(run, episodes=[{**row, "development": -abs(at - 3)} for at, row in enumerate(run.episodes)])
    assert findings(measured)[0].told.endswith("; the policy is of episode 4, before that")
    late = replace(run, episodes=[{**row, "development": at} for at, row in enumerate(run.episodes)])
    assert "the policy is of" not in findings(late)[0].told

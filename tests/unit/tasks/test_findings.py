"""Why a run learnt little: planted causes are named, healthy runs are not accused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from rlhf_core.config import PipelineConfig
from tasks.report.findings import RULES, Figures, findings, hacks, learnt_little
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
    for rule in RULES:
        for key in _KEY.findall(rule.advice):
            part: Any = config
            for name in key.split("."):
                assert name in part, key
                part = part[name]

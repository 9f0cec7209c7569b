"""An episode's figures, by hand."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.ppo.metrics import (
    PPOStats,
    episode_metrics,
    judgement_metrics,
    judgement_sums,
    staleness,
    stats_from,
    step_means,
)
from rlhf_core.strategy.ranks import ALONE
from rlhf_core.types import EpisodeControls, Sample


def sample(score: float, raw: dict[str, float]) -> Sample:
    return Sample(
        prompt="p", answer="a", response="r", key="k", score=score, verifier=0.0, well_formed=True, rm_score=None,
        kl=2 * score, length=3, ended=True, raw_scores=raw,
    )  # fmt: skip


def test_means_over_samples_and_steps_and_what_the_rewards_were_made_with() -> None:
    stats = [stats_from({"actor_loss": 1.0, "max_ratio": 2.0}), stats_from({"actor_loss": 3.0, "max_ratio": 4.0})]
    samples = [sample(1.0, {"gsm8k": 10.0}), sample(0.0, {"gsm8k": 1.0})]
    found = episode_metrics(samples, EpisodeControls(kl_coef=0.05, score_std=2.0), ALONE)
    found |= step_means(stats) | staleness(torch.tensor([3, 4]), learnt_at=4)
    expected = {
        "samples": 2.0, "score": 0.5, "kl": 1.0, "length": 3.0, "staleness": 0.5, "staleness_max": 1.0,
        "kl_coef": 0.05, "score_scale": 2.0, "raw/gsm8k": 5.5, "actor_loss": 2.0, "max_ratio": 3.0, "skipped": 0.0,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found.keys() >= set(PPOStats._fields)


def test_figures_that_overflowed_are_numbers_that_json_holds() -> None:
    stats = stats_from({"actor_loss": float("nan"), "max_ratio": float("inf")})
    assert (stats.actor_loss, stats.max_ratio) == (0.0, pytest.approx(3.4028234663852886e38))
    assert step_means([stats, stats])["max_ratio"] == pytest.approx(3.4028234663852886e38)


def test_norms_are_those_of_the_steps_that_were_taken() -> None:
    stats = [
        stats_from({"actor_grad_norm": 2.0, "critic_grad_norm": 3.0}),
        stats_from({"actor_overflowed": 1.0, "critic_grad_norm": 5.0}),
        stats_from({"skipped": 1.0, "critic_overflowed": 1.0}),
    ]
    found = step_means(stats)
    assert (found["actor_grad_norm"], found["critic_grad_norm"]) == (2.0, 4.0)
    assert (found["actor_overflowed"], found["critic_overflowed"]) == (pytest.approx(1 / 3), pytest.approx(1 / 3))


def judged(parts: dict[str, float], *, verifier: float, well_formed: bool) -> Sample:
    return Sample(
        prompt="p", answer="a", response="r", key="k", score=float(sum(parts.values())), verifier=verifier,
        well_formed=well_formed, rm_score=None, kl=0.0, length=1, ended=True, parts=parts,
        raw_scores={"verifier": verifier},
    )  # fmt: skip


def metrics_of(samples: list[Sample]) -> dict[str, float]:
    return episode_metrics(samples, EpisodeControls(0.1), ALONE)


def test_shares_of_the_rewards_variance_by_hand() -> None:
    # verifier 1, 0, 0, 1; reward model 0.5, 0.5, -0.5, -0.5; totals 1.5, 0.5, -0.5, 0.5, mean 0.5
    # var(total) = (1 + 0 + 1 + 0) / 4 = 0.5; cov(verifier, total) = (0.5 + 0 + 0.5 + 0) / 4 = 0.25, as the other's
    models = (0.5, 0.5, -0.5, -0.5)
    found = metrics_of(
        [
            judged({"verifier": right, "reward_model": model, "none": 0.0}, verifier=right, well_formed=True)
            for right, model in zip((1.0, 0.0, 0.0, 1.0), models, strict=True)
        ]
    )
    shares = {name: value for name, value in found.items() if name.startswith("reward_share_")}
    expected = {"reward_share_verifier": 0.5, "reward_share_reward_model": 0.5, "reward_share_none": 0.0}
    assert shares == pytest.approx(expected)


def test_a_source_that_works_against_the_others_has_a_share_below_0() -> None:
    # parts 3, 0 and -1, 0: totals 2, 0; var(total) = 1, cov(3 0, total) = 1.5, cov(-1 0, total) = -0.5
    found = metrics_of(
        [judged({"a": 3.0, "b": -1.0}, verifier=0.0, well_formed=False), judged({"a": 0.0, "b": 0.0}, verifier=0.0,
         well_formed=False)]
    )  # fmt: skip
    assert (found["reward_share_a"], found["reward_share_b"]) == pytest.approx((1.5, -0.5))


def test_a_reward_that_does_not_vary_has_no_shares_whatever_float32_rounds() -> None:
    rounded = [torch.tensor(value, dtype=torch.float32).item() for value in (0.1, 0.7)]
    samples = [
        judged({"a": part, "b": torch.tensor(1 - part, dtype=torch.float32).item()}, verifier=0.0, well_formed=True)
        for part in rounded
    ]
    found = metrics_of(samples)
    assert (found["reward_share_a"], found["reward_share_b"]) == (0.0, 0.0)


def test_scores_and_verdicts_have_the_standard_deviation_of_a_sample() -> None:
    # scores 1, 2, 6: mean 3, squared deviations 4 + 1 + 9 = 14, over 2; verdicts 0.5, 0.5, 0.5 do not vary
    found = metrics_of([judged({"a": part}, verifier=0.5, well_formed=True) for part in (1.0, 2.0, 6.0)])
    assert (found["score_std"], found["verifier_std"]) == (pytest.approx(7**0.5), 0.0)
    assert metrics_of([judged({"a": 0.1}, verifier=0.1, well_formed=True)])["score_std"] == 0.0
    assert metrics_of([judged({"a": 0.1}, verifier=0.7, well_formed=True) for _ in range(3)])["verifier_std"] == 0.0
    unverified = metrics_of([sample(1.0, {}), sample(3.0, {})])
    assert unverified["score_std"] == pytest.approx(2**0.5)
    assert "verifier_std" not in unverified


def test_accuracy_given_the_form_is_of_the_well_formed_alone() -> None:
    rows = [(1.0, True), (0.1, True), (1.0, True), (0.0, False), (0.0, False)]  # a tenth is the form, not the answer
    found = metrics_of([judged({}, verifier=verifier, well_formed=formed) for verifier, formed in rows])
    assert found["accuracy_given_form"] == pytest.approx(2 / 3)
    assert metrics_of([judged({}, verifier=0.0, well_formed=False)])["accuracy_given_form"] == 0.0


def test_ranks_together_say_what_one_would_say_of_all() -> None:
    samples = [
        judged({"verifier": float(row % 2), "model": row / 7 - 0.3 * (row % 3)}, verifier=float(row % 2),
               well_formed=row % 3 > 0)
        for row in range(9)
    ]  # fmt: skip
    sources = {"sources": ("verifier", "model"), "terms": ("verifier", "model")}
    alone = judgement_metrics(judgement_sums(samples, **sources), 9)
    here, there = judgement_sums(samples[:4], **sources), judgement_sums(samples[4:], **sources)
    together = judgement_metrics({name: here[name] + there[name] for name in here}, 9)
    assert together == pytest.approx(alone)
    assert sum(value for name, value in alone.items() if name.startswith("reward_share_")) == pytest.approx(1.0)

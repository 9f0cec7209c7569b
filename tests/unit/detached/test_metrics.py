"""An episode's figures, by hand."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.detached.metrics import episode_metrics
from rlhf_core.trainer.ppo.stats import PPOStats, stats_from
from rlhf_core.types import EpisodeControls, Sample


def sample(score: float, raw: dict[str, float]) -> Sample:
    return Sample(
        prompt="p", answer="a", response="r", key="k", score=score, verifier=0.0, well_formed=True, rm_score=None,
        kl=2 * score, length=3, ended=True, raw_scores=raw,
    )  # fmt: skip


def test_means_over_samples_and_steps_and_what_the_rewards_were_made_with() -> None:
    stats = [stats_from({"actor_loss": 1.0, "max_ratio": 2.0}), stats_from({"actor_loss": 3.0, "max_ratio": 4.0})]
    found = episode_metrics(
        [sample(1.0, {"gsm8k": 10.0}), sample(0.0, {"gsm8k": 1.0})],
        stats,
        versions=torch.tensor([3, 4]),
        learnt_at=4,
        controls=EpisodeControls(kl_coef=0.05, score_std=2.0),
    )
    expected = {
        "reward": 0.5, "kl": 1.0, "length": 3.0, "staleness": 1.0, "kl_coef": 0.05, "score_std": 2.0,
        "raw/gsm8k": 5.5, "actor_loss": 2.0, "max_ratio": 3.0, "skipped": 0.0,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found.keys() >= set(PPOStats._fields)


def test_figures_that_overflowed_are_numbers_that_json_holds() -> None:
    stats = stats_from({"actor_loss": float("nan"), "max_ratio": float("inf")})
    assert (stats.actor_loss, stats.max_ratio) == (0.0, pytest.approx(3.4028234663852886e38))
    two = episode_metrics(
        [sample(1.0, {})], [stats, stats], versions=torch.zeros(1), learnt_at=0, controls=EpisodeControls(0.1)
    )
    assert two["max_ratio"] == pytest.approx(3.4028234663852886e38)


def test_norms_are_those_of_the_steps_that_were_taken() -> None:
    stats = [
        stats_from({"actor_grad_norm": 2.0, "critic_grad_norm": 3.0}),
        stats_from({"actor_overflowed": 1.0, "critic_grad_norm": 5.0}),
        stats_from({"skipped": 1.0, "critic_overflowed": 1.0}),
    ]
    found = episode_metrics(
        [sample(1.0, {})], stats, versions=torch.zeros(1), learnt_at=0, controls=EpisodeControls(0.1)
    )
    assert (found["actor_grad_norm"], found["critic_grad_norm"]) == (2.0, 4.0)
    assert (found["actor_overflowed"], found["critic_overflowed"]) == (pytest.approx(1 / 3), pytest.approx(1 / 3))

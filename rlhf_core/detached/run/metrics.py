"""One episode in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from torch import Tensor

from rlhf_core.trainer.ppo.judgement import judgement_metrics, judgement_sums
from rlhf_core.trainer.ppo.learner import PPOStats
from rlhf_core.types import EpisodeControls, Sample


def episode_metrics(
    samples: Sequence[Sample],
    stats: Sequence[PPOStats],
    *,
    versions: Tensor,
    learnt_at: int,
    controls: EpisodeControls,
) -> dict[str, float]:
    """Return the means over an episode's samples and over its optimizer steps, and `judgement_metrics`.

    Args:
        samples: every response with what was made of it.
        stats: `PPOStats` of each optimizer step.
        versions: policy version of each sample, [B].
        learnt_at: policy version at the start of the episode that learnt; staleness is counted from it.
        controls: that the episode's rewards were made with.
    """
    metrics = {
        "reward": fmean(sample.score for sample in samples),
        "verifier": fmean(sample.verifier for sample in samples),
        "well_formed": fmean(sample.well_formed for sample in samples),
        "kl": fmean(sample.kl for sample in samples),
        "length": fmean(sample.length for sample in samples),
        "ended": fmean(sample.ended for sample in samples),
        "samples": float(len(samples)),
        "staleness": float(learnt_at - versions.double().mean().item()),
        "staleness_max": float(learnt_at - int(versions.min())),
        "kl_coef": controls.kl_coef,
        "score_std": controls.score_std,
    }
    for source in sorted({name for sample in samples for name in sample.raw_scores}):
        metrics[f"raw/{source}"] = fmean(sample.raw_scores.get(source, 0.0) for sample in samples)
    scores = [sample.rm_score for sample in samples if sample.rm_score is not None]
    if scores:
        metrics["rm_score"] = fmean(scores)
    for name in PPOStats._fields:
        metrics[name] = fmean(float(getattr(stat, name)) for stat in stats)
    return metrics | judgement_metrics(judgement_sums(samples), len(samples)) | _norms(stats)


def _norms(stats: Sequence[PPOStats]) -> dict[str, float]:
    """Return the mean norms of the steps that were taken; 0 if none was."""
    actor = [stat.actor_grad_norm for stat in stats if not stat.skipped and not stat.actor_overflowed]
    critic = [stat.critic_grad_norm for stat in stats if not stat.critic_overflowed]
    return {"actor_grad_norm": fmean(actor or [0.0]), "critic_grad_norm": fmean(critic or [0.0])}

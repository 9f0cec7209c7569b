"""How an episode's scores vary, which source of reward they follow, and how good the well-formed answers are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum, sqrt

from rlhf_core.rewards.sources import VERIFIER
from rlhf_core.rewards.verifying import RIGHT
from rlhf_core.types import Sample

SHARE = "reward_share_"
GIVEN_FORM = "accuracy_given_form"
REWARD_STD, VERIFIER_STD = "reward_std", "verifier_std"
_ROUNDING = 1e-10
"""A total whose variance is a smaller part than this of its sources' squares varies by their rounding alone."""
_EQUAL = 1e-14
"""Values whose squared deviations are a smaller part than this of their squares are equal but for rounding."""
_SCORES, _SCORES_SQUARED, _VERIFIED, _VERIFIED_SQUARED = "scores", "scores squared", "verified", "verified squared"
_TOTAL, _TOTAL_SQUARED, _FORMED, _FORMED_RIGHT = "total", "total squared", "formed", "formed and right"
_MEAN, _CROSS, _SQUARED = "sum of ", "product with total of ", "squares of "


def judgement_sums(samples: Sequence[Sample]) -> dict[str, float]:
    """Return sums over samples from which `judgement_metrics` are made: those of several ranks may be added.

    Args:
        samples: at least one; all have the same sources.
    """
    totals = [fsum(sample.parts.values()) for sample in samples]
    scores = [sample.score for sample in samples]
    sums: dict[str, float] = {_SCORES: fsum(scores), _SCORES_SQUARED: fsum(score * score for score in scores)}
    for name in sorted(samples[0].parts):
        part = [sample.parts[name] for sample in samples]
        sums[_MEAN + name] = fsum(part)
        sums[_CROSS + name] = fsum(value * total for value, total in zip(part, totals, strict=True))
        sums[_SQUARED + name] = fsum(value * value for value in part)
    if samples[0].parts:
        sums |= {_TOTAL: fsum(totals), _TOTAL_SQUARED: fsum(total * total for total in totals)}
    if VERIFIER in samples[0].raw_scores:
        formed = [sample for sample in samples if sample.well_formed]
        sums |= {_FORMED: len(formed), _FORMED_RIGHT: sum(sample.verifier >= RIGHT for sample in formed)}
        sums[_VERIFIED] = fsum(sample.verifier for sample in samples)
        sums[_VERIFIED_SQUARED] = fsum(sample.verifier**2 for sample in samples)
    return sums


def judgement_metrics(sums: Mapping[str, float], rows: float) -> dict[str, float]:
    """Return how the scores vary, what share of that each source has, and the accuracy of well-formed answers.

        reward_std     = sqrt(sum_i (score_i - mean(score))^2 / (rows - 1))
        reward_share_s = cov(part_s, total) / var(total)        total = sum_s part_s

    The shares sum to 1. A source that always says the same, or has no weight, has share 0; one that works against the
    others may have a share below 0, and another one above 1. All are 0 where the total does not vary.

    Args:
        sums: of `judgement_sums`, over all ranks.
        rows: number of samples.

    Returns:
        `reward_std`, 0 for a single sample; `reward_share_<source>` for each source; where a verifier judged,
        `verifier_std`, the same of what it says, and `accuracy_given_form`: the share of the well-formed answers that
        it finds right, 0 if none is well formed.
    """
    names = [name.removeprefix(_MEAN) for name in sums if name.startswith(_MEAN)]
    metrics = {REWARD_STD: _std(sums[_SCORES], sums[_SCORES_SQUARED], rows)}
    if names:
        mean = sums[_TOTAL] / rows
        variance = sums[_TOTAL_SQUARED] / rows - mean * mean
        varies = variance > _ROUNDING * sum(sums[_SQUARED + name] for name in names) / rows
        for name in names:
            covariance = sums[_CROSS + name] / rows - sums[_MEAN + name] / rows * mean
            metrics[SHARE + name] = covariance / variance if varies else 0.0
    if _FORMED in sums:
        metrics[GIVEN_FORM] = sums[_FORMED_RIGHT] / sums[_FORMED] if sums[_FORMED] else 0.0
        metrics[VERIFIER_STD] = _std(sums[_VERIFIED], sums[_VERIFIED_SQUARED], rows)
    return metrics


def _std(total: float, squares: float, rows: float) -> float:
    """Return the standard deviation of a sample from its sum and the sum of its squares."""
    deviations = squares - total * total / rows
    return sqrt(deviations / (rows - 1)) if rows > 1 and deviations > _EQUAL * squares else 0.0

"""Are a reward model's probabilities those with which it is right? And how are its scores spread?"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class PairCalibration(NamedTuple):
    """What a reward model's confidence is worth; bins of equal width cover confidences from 1/2 to 1."""

    counts: Int[Tensor, " K"]
    """Pairs of each bin."""
    confidence: Float[Tensor, " K"]
    """Mean confidence of its pairs; 0 in an empty bin."""
    correct: Float[Tensor, " K"]
    """Share of its pairs in which the preferred response is the chosen one; 0 in an empty bin."""
    expected_error: Float[Tensor, ""]
    brier: Float[Tensor, ""]


class ScoreHistogram(NamedTuple):
    """Scores of chosen and rejected responses over the same bins."""

    edges: Float[Tensor, " E"]
    """One more than there are bins; a score on an inner edge belongs to the bin above it."""
    chosen: Int[Tensor, " K"]
    rejected: Int[Tensor, " K"]


def pair_calibration(differences: Float[Tensor, " B"], *, bins: int = 10) -> PairCalibration:
    """Return how far a reward model's confidence is from its accuracy.

        p_i   = sigmoid(s_chosen - s_rejected)              probability of the right preference
        c_i   = max(p_i, 1 - p_i)                           confidence in the preference that the model has
        ECE   = sum_k (n_k / n) |mean correct_k - mean c_k|
        Brier = sum_i (1 - p_i)^2 / n

    The data says of every pair which response is better, so p itself has but one outcome; what can be well or ill
    calibrated is the confidence in the model's own preference. Both figures are the same when a pair's responses
    change places and the model's scores with them. A tie (p = 1/2) is half right: a model that says 1/2 of every pair
    is calibrated, if useless (Brier 1/4).

    Args:
        differences: score of the chosen response minus that of the rejected one, finite.
        bins: of equal width on [1/2, 1]; confidence 1 belongs to the last.

    Returns:
        Bins with their counts, expected calibration error and Brier score, in float64.

    Raises:
        ValueError: if there is no pair or no bin.

    Source:
        Guo et al. 2017, arXiv:1706.04599, equation 3; Brier 1950, Monthly Weather Review 78.

    Example:
        >>> found = pair_calibration(torch.tensor([0.0, 0.0]), bins=2)
        >>> found.counts.tolist(), found.expected_error.item(), found.brier.item()
        ([2, 0], 0.0, 0.25)
    """
    if not len(differences) or bins < 1:
        raise ValueError(f"expected at least one pair and one bin, got {len(differences)} pairs and {bins} bins")
    gaps = differences.double()
    confidence = torch.sigmoid(gaps.abs())
    correct = (gaps.sign() + 1) / 2  # 0 wrong, 1/2 a tie, 1 right
    places = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    counts = torch.bincount(places, minlength=bins)
    sizes = counts.clamp(min=1)
    mean_confidence = torch.bincount(places, weights=confidence, minlength=bins) / sizes
    mean_correct = torch.bincount(places, weights=correct, minlength=bins) / sizes
    error = (counts * (mean_correct - mean_confidence).abs()).sum() / len(gaps)
    brier = torch.sigmoid(-gaps).square().mean()
    return PairCalibration(counts, mean_confidence, mean_correct, error, brier)


def score_histogram(*, chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], bins: int = 20) -> ScoreHistogram:
    """Return how many chosen and rejected responses have scores in each bin from the lowest score to the highest.

        edge_k = min + k (max - min) / bins

    Args:
        chosen: scores of the preferred responses, finite.
        rejected: scores of the others.
        bins: of equal width; the highest score belongs to the last. All are in the first if all scores are equal.

    Returns:
        Edges in float64, and both counts.

    Raises:
        ValueError: if there are no scores or no bins.

    Example:
        >>> found = score_histogram(chosen=torch.tensor([1.0, 4.0]), rejected=torch.tensor([0.0, 1.0]), bins=2)
        >>> found.edges.tolist(), found.chosen.tolist(), found.rejected.tolist()
        ([0.0, 2.0, 4.0], [1, 1], [2, 0])
    """
    if not len(chosen) or bins < 1:
        raise ValueError(f"expected at least one pair and one bin, got {len(chosen)} pairs and {bins} bins")
    scores = torch.stack([chosen, rejected]).double()
    low, high = scores.min(), scores.max()
    width = (high - low) / bins
    places = torch.zeros_like(scores) if width == 0 else (scores - low) / width
    places = places.long().clamp(max=bins - 1)
    counts = [torch.bincount(row, minlength=bins) for row in places]
    return ScoreHistogram(low + width * torch.arange(bins + 1), counts[0], counts[1])

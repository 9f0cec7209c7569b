"""A reward model on held-out pairs and samples: accuracy, calibration, and the spread of its scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf_core.config import RewardModelConfig
from rlhf_core.data.encoding import EncodedPair
from rlhf_core.errors import DataError, TrainingError
from rlhf_core.functional.calibration import pair_calibration, score_histogram
from rlhf_core.functional.losses import pairwise_loss
from rlhf_core.functional.moments import varies
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.models.trunk import autocast, device_of, evaluating
from rlhf_core.strategy.ranks import ALONE, Ranks
from rlhf_core.training.micro_batches import cost_on, cut
from rlhf_core.training.padding import TokenIds, pad_right


@dataclass(frozen=True, slots=True)
class ConfidenceBin:
    """Pairs of similar confidence."""

    low: float
    high: float
    """Bounds of the confidence in the model's own preference; the upper one belongs to the next bin."""
    pairs: int
    confidence: float
    """Mean over the bin's pairs; 0 without any."""
    correct: float
    """Share whose preferred response is the chosen one, a tie counting half; 0 without any."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Scores of chosen and of rejected responses over the same bins."""

    edges: tuple[float, ...]
    """One more than there are bins."""
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PairMeasurement:
    """A reward model on held-out pairs."""

    pairs: int
    correct: int
    """Pairs whose chosen response scored strictly higher; a tie counts as wrong."""
    dropped: int
    """Pairs that were too long."""
    loss: float
    """Bradley-Terry loss per pair, without margins, in nats."""
    calibration_error: float
    """Expected calibration error over the bins."""
    brier: float
    bins: tuple[ConfidenceBin, ...]
    histogram: Histogram
    well_formed_pairs: int = 0
    """Pairs both of whose responses are known to have the form that is wanted: they differ in what is said."""
    well_formed_correct: int = 0
    """Of those, the correct ones."""

    @property
    def accuracy(self) -> float:
        """Share of correct pairs."""
        return self.correct / self.pairs

    def facts(self) -> dict[str, Any]:
        """Return everything as JSON holds it, the accuracy included."""
        return {"accuracy": self.accuracy, **asdict(self)}


class ScoreStatistics(NamedTuple):
    """Scores of held-out samples."""

    mean: float
    std: float


def measure_pairs(
    reward_model: RewardModel, pairs: Sequence[EncodedPair], config: RewardModelConfig, *, autocast_dtype: torch.dtype
) -> PairMeasurement:
    """Return accuracy, calibration and histogram on held-out pairs; those that are too long are dropped and counted.

    Raises:
        DataError: if no pair is left.
        TrainingError: if a score is not finite.
    """
    kept = [pair for pair in pairs if pair.longest <= config.max_length]
    rows = [sequence for pair in kept for sequence in (pair.chosen, pair.rejected)]
    scores = score_sequences(reward_model, rows, batch_size=2 * config.micro_batch_size, autocast_dtype=autocast_dtype)
    chosen, rejected = scores[0::2], scores[1::2]
    both = torch.tensor([bool(pair.both_well_formed) for pair in kept], dtype=torch.bool)
    return replace(
        measurement(chosen=chosen, rejected=rejected, dropped=len(pairs) - len(kept)),
        well_formed_pairs=int(both.sum()),
        well_formed_correct=int((both & (chosen > rejected)).sum()),
    )


def measurement(*, chosen: Tensor, rejected: Tensor, dropped: int = 0, ranks: Ranks = ALONE) -> PairMeasurement:
    """Return what the scores of held-out pairs say of the model that gave them, over all ranks.

    Raises:
        DataError: if there is no pair on any rank.
        TrainingError: if a score is not finite.
    """
    chosen, rejected = ranks.gather(chosen.float().cpu()), ranks.gather(rejected.float().cpu())
    if not len(chosen):
        raise DataError(f"expected held-out pairs to measure the reward model on, got none ({dropped} were too long)")
    if not bool(torch.isfinite(chosen).all() and torch.isfinite(rejected).all()):
        raise TrainingError("the reward model's scores of held-out pairs are not all finite; lower its learning rate")
    calibration = pair_calibration(chosen - rejected)
    histogram = score_histogram(chosen=chosen, rejected=rejected)
    number = len(calibration.counts)
    columns = (calibration.counts, calibration.confidence, calibration.correct)
    bins = [
        ConfidenceBin((1 + place / number) / 2, (1 + (place + 1) / number) / 2, *values)
        for place, values in enumerate(zip(*(column.tolist() for column in columns), strict=True))
    ]
    return PairMeasurement(
        pairs=len(chosen),
        correct=int((chosen > rejected).sum()),
        dropped=dropped,
        loss=pairwise_loss(chosen=chosen, rejected=rejected, denominator=len(chosen)).item(),
        calibration_error=calibration.expected_error.item(),
        brier=calibration.brier.item(),
        bins=tuple(bins),
        histogram=Histogram(*(tuple(column.tolist()) for column in histogram)),
    )


def standardise_scores(
    reward_model: RewardModel, sequences: Sequence[TokenIds], config: RewardModelConfig, *, autocast_dtype: torch.dtype
) -> ScoreStatistics:
    """Measure mean and standard deviation of the scores of held-out samples, and keep them in the reward model.

    Samples longer than `config.max_length` are left out. The deviation divides by the number of samples. When the
    scores do not vary by more than rounding it is taken as 1.

    Raises:
        DataError: if there are no samples that are short enough.
    """
    kept = [sequence for sequence in sequences if len(sequence) <= config.max_length]
    if not kept:
        raise DataError(
            f"expected held-out samples of at most {config.max_length} tokens to standardise the reward model's scores "
            f"with, got {len(sequences)}, all longer"
        )
    scores = score_sequences(
        reward_model, kept, batch_size=2 * config.micro_batch_size, autocast_dtype=autocast_dtype
    ).double()
    mean, std = scores.mean(), scores.std(correction=0)
    has_spread = varies(variance=std.square(), square=scores.square().mean())
    statistics = ScoreStatistics(mean.item(), std.item() if has_spread else 1.0)
    reward_model.score_mean.fill_(statistics.mean)
    reward_model.score_std.fill_(statistics.std)
    return statistics


def score_sequences(
    reward_model: nn.Module, sequences: Sequence[TokenIds], *, batch_size: int, autocast_dtype: torch.dtype
) -> Tensor:
    """Return the raw score of each whole sequence, [B], in host memory; the model's mode comes out as it was."""
    device = device_of(reward_model)
    scores = torch.zeros(len(sequences))
    with evaluating(reward_model), torch.no_grad(), autocast(device, autocast_dtype):
        for places in cut(sequences, batch_size, cost_on(device, reward_model)):
            found = reward_model(*pad_right([sequences[place] for place in places], device))
            scores[places] = found.float().cpu()
    return scores

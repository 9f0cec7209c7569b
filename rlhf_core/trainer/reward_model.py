"""Bradley-Terry training of a reward model, and what is measured on held-out pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_core.buffer.order import minibatch_order
from rlhf_core.config import RewardModelConfig
from rlhf_core.data.encoding import EncodedPair
from rlhf_core.errors import DataError
from rlhf_core.functional.losses import pairwise_loss
from rlhf_core.models.device import autocast, device_of
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.trainer.base import Metrics, OnStep, TokenIds, pad_right, training_mode
from rlhf_core.trainer.optim import Trained, make_trained, take_step, warmup_then_decay

Pair = tuple[TokenIds, TokenIds] | EncodedPair
"""Token ids of the chosen and of the rejected sequence: prompt and response."""

_SMALLEST_STD = 1e-6  # below, all scores are equal but for rounding


class RewardModelTraining(NamedTuple):
    """What came of the training."""

    history: list[Metrics]
    """Of each step: step, loss, accuracy, lr, grad_norm."""
    dropped: int
    """Pairs that were too long."""


class PairAccuracy(NamedTuple):
    """How often the chosen response scored higher; an equal score counts as wrong."""

    correct: int
    pairs: int
    dropped: int
    """Pairs that were too long."""

    @property
    def accuracy(self) -> float:
        """Share of correct pairs; not a number when there are none."""
        return self.correct / self.pairs if self.pairs else math.nan


class ScoreStatistics(NamedTuple):
    """Scores of held-out samples."""

    mean: float
    std: float


def train_reward_model(
    reward_model: RewardModel,
    pairs: Sequence[Pair],
    config: RewardModelConfig,
    *,
    seed: int,
    autocast_dtype: torch.dtype,
    on_step: OnStep | None = None,
) -> RewardModelTraining:
    """Train a reward model, in place, to score the chosen sequence above the rejected one.

    Args:
        reward_model: on its device, in float32.
        pairs: token ids, chosen first.
        config: epochs, batch sizes, learning rates of trunk and head.
        seed: of the order and of dropout.
        autocast_dtype: arithmetic of the trunk's forward pass.
        on_step: told the metrics of each step as it ends.

    Returns:
        The history, and how many pairs were dropped as longer than `config.max_length`.

    Raises:
        DataError: before any training, if no pair is left.
        TrainingError: if a loss or gradient is not finite.
    """
    kept = _short_enough(pairs, config.max_length)
    if not kept:
        raise DataError(
            f"expected at least one preference pair within {config.max_length} tokens, got {len(pairs)} pairs, all "
            "longer; raise reward_model.max_length or give more pairs"
        )
    steps_per_epoch = -(-len(kept) // config.batch_size)
    trained = make_trained(
        reward_model,
        lr=config.lr,
        weight_decay=config.weight_decay,
        schedule=warmup_then_decay(config.warmup_steps, config.epochs * steps_per_epoch),
        other_lrs={"head.": config.head_lr},
    )
    history: list[Metrics] = []
    with training_mode(reward_model, seed=seed):
        for epoch in range(1, config.epochs + 1):  # from 1: the first pass is permuted too
            for rows in minibatch_order(
                seed=seed, episode=0, epoch=epoch, samples=len(kept), batch_size=config.batch_size
            ):
                batch = [kept[row] for row in rows]
                metrics = {"step": float(len(history) + 1)} | _step(trained, batch, config, autocast_dtype)
                history.append(metrics)
                if on_step is not None:
                    on_step(metrics)
    return RewardModelTraining(history, len(pairs) - len(kept))


def pair_accuracy(
    reward_model: RewardModel,
    pairs: Sequence[Pair],
    config: RewardModelConfig,
    *,
    autocast_dtype: torch.dtype,
) -> PairAccuracy:
    """Return on how many held-out pairs the chosen sequence scores strictly higher; long ones are dropped."""
    kept = _short_enough(pairs, config.max_length)
    rows = [sequence for pair in kept for sequence in pair[:2]]
    scores = score_sequences(reward_model, rows, batch_size=2 * config.micro_batch_size, autocast_dtype=autocast_dtype)
    correct = int((scores[0::2] > scores[1::2]).sum())
    return PairAccuracy(correct, len(kept), len(pairs) - len(kept))


def standardise_scores(
    reward_model: RewardModel,
    sequences: Sequence[TokenIds],
    config: RewardModelConfig,
    *,
    autocast_dtype: torch.dtype,
) -> ScoreStatistics:
    """Measure mean and standard deviation of the scores of held-out samples, and keep them in the reward model.

    Samples longer than `config.max_length` are left out. The deviation divides by the number of samples. When all
    scores are equal it is taken as 1.

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
    mean, std = scores.mean().item(), scores.std(correction=0).item()
    statistics = ScoreStatistics(mean, std if std > _SMALLEST_STD else 1.0)
    reward_model.score_mean.fill_(statistics.mean)
    reward_model.score_std.fill_(statistics.std)
    return statistics


def score_sequences(
    reward_model: RewardModel,
    sequences: Sequence[TokenIds],
    *,
    batch_size: int,
    autocast_dtype: torch.dtype,
) -> Tensor:
    """Return the raw score of each whole sequence, [B], in host memory."""
    device = device_of(reward_model)
    reward_model.eval()
    scores = [torch.zeros(0)]
    with torch.no_grad(), autocast(device, autocast_dtype):
        for start in range(0, len(sequences), batch_size):
            ids, mask = pad_right(sequences[start : start + batch_size], device)
            scores.append(reward_model(ids, mask).cpu())
    return torch.cat(scores)


def _step(trained: Trained, batch: Sequence[Pair], config: RewardModelConfig, autocast_dtype: torch.dtype) -> Metrics:
    lr = trained.scheduler.get_last_lr()[0]
    device = device_of(trained.model)
    total, correct = torch.zeros((), device=device), torch.zeros((), device=device)
    for start in range(0, len(batch), config.micro_batch_size):
        micro = batch[start : start + config.micro_batch_size]
        ids, mask = pad_right([*(pair[0] for pair in micro), *(pair[1] for pair in micro)], device)
        with autocast(device, autocast_dtype):
            chosen, rejected = trained.model(ids, mask).chunk(2)
        loss = pairwise_loss(chosen=chosen, rejected=rejected, denominator=len(batch))
        torch.autograd.backward(loss)
        total += loss.detach()
        correct += (chosen > rejected).sum()
    norm = take_step(trained, grad_clip=config.grad_clip, loss=total, what="reward model")
    accuracy = correct.item() / len(batch)
    return {"loss": total.item(), "accuracy": accuracy, "lr": float(lr), "grad_norm": norm}


def _short_enough(pairs: Sequence[Pair], max_length: int) -> list[Pair]:
    return [pair for pair in pairs if max(len(pair[0]), len(pair[1])) <= max_length]

"""Supervised fine-tuning on demonstrations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.config import SFTConfig
from rlhf_core.errors import DataError
from rlhf_core.models.compatibility import check_vocabulary, vocabulary_size
from rlhf_core.models.lora import attach_lora
from rlhf_core.models.trunk import device_of, evaluating
from rlhf_core.strategy.booster import Booster
from rlhf_core.strategy.ranks import ALONE, Ranks, current_ranks
from rlhf_core.supervised.batches import (
    Demonstration,
    MaskedTokens,
    TokenBatch,
    as_masked,
    token_batch,
    token_batch_of,
)
from rlhf_core.supervised.packing import check_packing, packed_batches
from rlhf_core.supervised.step import TokenObjective, boosted_for_stage, stage_booster, train_epochs
from rlhf_core.supervised.trainer import SupervisedTrainer
from rlhf_core.training.boosted import rounds
from rlhf_core.training.optim import Metrics, OnStep, Trained


class TokenLoss(NamedTuple):
    """Loss of held-out demonstrations."""

    loss: float
    """Mean over their tokens to learn, in nats."""
    tokens: int

    @property
    def perplexity(self) -> float:
        """Return exp(loss); infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf  # noqa: PLR2004 - e^710 is no double


class SFTRun(NamedTuple):
    """What came of the training."""

    history: list[Metrics]
    """Of each step: step, loss, lr, grad_norm, tokens; of each epoch's last one heldout_loss too, if there are any."""
    trained: Trained
    """The model with its booster, whose `exact` gives the weights, wherever the strategy keeps them."""


def train_sft(
    model: PreTrainedModel,
    examples: Sequence[Demonstration],
    config: SFTConfig,
    *,
    seed: int,
    autocast_dtype: torch.dtype,
    on_step: OnStep | None = None,
    heldout: Sequence[Demonstration] = (),
    ranks: Ranks | None = None,
) -> SFTRun:
    """Train a causal language model to answer as the demonstrations do; in place, unless the strategy shards weights.

    The loss is on response tokens only, and a token mean over each minibatch, of all ranks together. With
    `config.packing` the same minibatches go through the model in fewer rows; the numbers stay. With `config.lora`,
    adapters are attached to the model first and they alone are trained; `models.lora.save_merged` writes the result.

    Args:
        model: on its device, in float32 (with adapters: in any dtype). Whoever needs it afterwards takes it from the
            result's booster.
        examples: demonstrations, stop tokens included; the same on every rank.
        config: epochs, batch sizes (of one rank), learning rate.
        seed: of the order, of the adapters and of dropout.
        autocast_dtype: arithmetic of the forward pass.
        on_step: told the metrics of each step as it ends.
        heldout: demonstrations whose loss is measured after each epoch.
        ranks: who trains together; None takes torch.distributed's default group.

    Raises:
        DataError: before any training, if there is no example, or one is too long, has an empty part, or has a token
            that the model does not know.
        ConfigError: before any training, if the model cannot keep packed examples apart, or the strategy cannot be
            had here.
        TrainingError: if a loss or gradient is not finite.
    """
    ranks = current_ranks() if ranks is None else ranks
    rows, unseen = _checked(examples, config.max_length, model), _checked(heldout, config.max_length, model, least=0)
    if config.packing:
        check_packing(model, longest=max(len(row.ids) for row in rows), vocabulary=vocabulary_size(model) or 1)
    device = device_of(model)
    booster = stage_booster(config, dtype=autocast_dtype, device=device, ranks=ranks)
    if config.lora is not None:
        attach_lora(model, config.lora, seed=seed)
    trained = boosted_for_stage(model, booster, config, samples=len(rows), ranks=ranks)
    objective = TokenObjective(device, autocast_dtype)

    def measure() -> Metrics:
        mine = rounds(
            trained.booster, _micros(unseen[ranks.rank :: ranks.world_size], config), ranks,
            what="measure the held-out demonstrations",
        )  # fmt: skip
        return {"heldout_loss": _mean(_token_sums(trained.model, mine, objective), ranks).loss}

    history = train_epochs(
        trained,
        objective,
        config,
        samples=len(rows),
        micros=lambda places: _micros([rows[place] for place in places], config),
        seed=seed,
        ranks=ranks,
        on_step=on_step,
        at_epoch_end=measure if unseen else None,
    )
    return SFTRun(history, trained)


def heldout_loss(
    model: PreTrainedModel, examples: Sequence[Demonstration], config: SFTConfig, *, autocast_dtype: torch.dtype
) -> TokenLoss:
    """Return the loss of demonstrations that are not learnt, in batches as training has them.

    Raises:
        DataError: if there is none, or one is too long or not as it should be.
    """
    rows = _checked(examples, config.max_length, model)
    return mean_token_loss(model, _micros(rows, config), autocast_dtype=autocast_dtype)


def mean_token_loss(model: nn.Module, batches: Iterable[TokenBatch], *, autocast_dtype: torch.dtype) -> TokenLoss:
    """Return the loss of the tokens to learn over all batches; the model's mode comes out as it was.

    Raises:
        DataError: if there is no token to learn.
    """
    return _mean(_token_sums(model, batches, TokenObjective(device_of(model), autocast_dtype)), ALONE)


def _token_sums(model: nn.Module, batches: Iterable[TokenBatch | None], objective: TokenObjective) -> Tensor:
    """Return the sum of losses and the number of tokens to learn; None stands for an idle pass.

    The model's mode comes out as it was.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    with evaluating(model), torch.no_grad():
        for batch in batches:
            (loss,) = objective.loss(model, objective.idle() if batch is None else batch, denominator=1.0)
            if batch is not None:
                sums += torch.tensor([loss.item(), batch.tokens], dtype=torch.float64)
    return sums


def _mean(sums: Tensor, ranks: Ranks) -> TokenLoss:
    total, tokens = ranks.sum(sums).tolist()
    if not tokens:
        raise DataError("expected held-out demonstrations with tokens to learn, got none")
    return TokenLoss(total / tokens, int(tokens))


def _micros(rows: Sequence[MaskedTokens], config: SFTConfig) -> list[TokenBatch]:
    size = config.micro_batch_size
    if config.packing:
        return packed_batches(rows, capacity=config.max_length, size=size)
    return [token_batch(rows[start : start + size]) for start in range(0, len(rows), size)]


def _checked(
    examples: Sequence[Demonstration], max_length: int, model: PreTrainedModel, *, least: int = 1
) -> list[MaskedTokens]:
    if len(examples) < least:
        raise DataError("expected at least one demonstration to train on, got none")
    rows = [as_masked(example) for example in examples]
    size = vocabulary_size(model)
    for number, (row, example) in enumerate(zip(rows, examples, strict=True), start=1):
        name = f"demonstration {number} of {len(examples)}"
        if len(row.ids) > max_length:
            raise DataError(
                f"{name} has {len(row.ids)} tokens, but sft.max_length is {max_length}; "
                "raise sft.max_length or shorten the demonstration"
            )
        if not all(example):
            raise DataError(f"{name} has an empty prompt or response")
        if len(row.ids) != len(row.loss_mask) or not any(row.loss_mask[1:]):
            raise DataError(f"{name} has no token to learn, or a loss mask of another length than its tokens")
        check_vocabulary(torch.tensor(row.ids), size, what=f"{name}'s tokens")
    return rows


class SFTTrainer(SupervisedTrainer[TokenBatch]):
    """coati's trainer on demonstrations; the arithmetic is `train_sft`'s.

    Args:
        model: a causal language model, as `booster.boost` returned it.
        booster: of the protocol `Booster`; it clips gradients, and says in which precision the model runs.
        optim: the optimizer, boosted.
        lr_scheduler: stepped once per optimizer step.
        max_epochs: passes over the training data.
        plugin: the booster's; without a meaning here.
        accumulation_steps: batches per optimizer step.
        apply_loss_mask: learn only what the batch's loss_mask or labels say; False learns every token.
        start_epoch: the first pass's number, from 0.
        save_interval: optimizer steps between checkpoints; None or 0 writes one before each measurement and at the end.
        save_dir: of the checkpoints; None writes none.
        coordinator: without a meaning here.
    """

    name = "sft"

    def __init__(
        self,
        model: nn.Module,
        booster: Booster,
        optim: Any,
        lr_scheduler: Any,
        max_epochs: int = 2,
        plugin: Any = None,  # noqa: ARG002 - coati's
        accumulation_steps: int = 8,
        apply_loss_mask: bool = True,
        start_epoch: int = 0,
        save_interval: int | None = None,
        save_dir: str | Path | None = None,
        coordinator: Any = None,  # noqa: ARG002
    ) -> None:
        super().__init__(
            model,
            booster,
            optim,
            lr_scheduler,
            max_epochs=max_epochs,
            accumulation_steps=accumulation_steps,
            start_epoch=start_epoch,
            save_interval=save_interval,
            save_dir=save_dir,
        )
        self.apply_loss_mask = apply_loss_mask

    def _objective(self) -> TokenObjective:
        return TokenObjective(self.device, self.autocast_dtype)

    def _read(self, batch: Mapping[str, Any], *, training: bool) -> TokenBatch:  # noqa: ARG002 - both are read alike
        micro = token_batch_of(batch, apply_loss_mask=self.apply_loss_mask)
        check_vocabulary(micro.input_ids, self.vocabulary, what="a batch's input_ids")
        return micro

    def _score(self, micros: Iterable[TokenBatch | None]) -> tuple[Tensor, ...]:
        return (_token_sums(self.trained.model, micros, self._objective()),)

    def _figures(self, scores: tuple[Tensor, ...], epoch: int) -> Metrics:  # noqa: ARG002
        found = _mean(scores[0], self.ranks)
        return {"loss": found.loss, "perplexity": found.perplexity, "tokens": float(found.tokens)}

"""Supervised fine-tuning on demonstrations, one to a row or several packed into one.

Packing leaves little of a row to padding, and changes no number: no demonstration sees another. `check_packing` sees
that this holds for the model at hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.config import SFTConfig
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.models.compatibility import check_vocabulary, vocabulary_size
from rlhf_core.models.lora import attach_lora
from rlhf_core.models.trunk import device_of, evaluating
from rlhf_core.strategy.booster import Booster
from rlhf_core.strategy.ranks import ALONE, Ranks
from rlhf_core.supervised.batches import (
    Demonstration,
    MaskedTokens,
    TokenBatch,
    as_masked,
    token_batch,
    token_batch_of,
)
from rlhf_core.supervised.step import TokenObjective, boosted_for_stage, kept_logits, stage_booster, train_epochs
from rlhf_core.supervised.trainer import SupervisedTrainer
from rlhf_core.training.boosted import pass_cost, ranks_of, rounds
from rlhf_core.training.micro_batches import PassCost, cost_on, cut
from rlhf_core.training.optim import Metrics, OnStep, Trained

SHORT = 7
"""Tokens of the second sequence with which `check_packing` probes a model."""
_LAST = 4  # positions compared at the end of each sequence: the last one has read most
_TOLERANCE = {torch.float32: 2e-4}
_COARSE_TOLERANCE = 3e-2  # of numbers of 16 bits


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
    ranks = ranks_of(config, ranks)
    rows, unseen = _checked(examples, config.max_length, model), _checked(heldout, config.max_length, model, least=0)
    if config.packing:
        check_packing(model, longest=max(len(row.ids) for row in rows), vocabulary=vocabulary_size(model) or 1)
    device = device_of(model)
    booster = stage_booster(config, dtype=autocast_dtype, device=device, ranks=ranks)
    if config.lora is not None:
        attach_lora(model, config.lora, seed=seed)
    trained = boosted_for_stage(model, booster, config, samples=len(rows), ranks=ranks)
    objective = TokenObjective(device, autocast_dtype)
    cost = pass_cost(trained.booster, trained.model, device)

    def measure() -> Metrics:
        mine = rounds(
            trained.booster, _micros(unseen[ranks.rank :: ranks.world_size], config, cost), ranks,
            what="measure the held-out demonstrations",
        )  # fmt: skip
        return {"heldout_loss": _mean(_token_sums(trained.model, mine, objective), ranks).loss}

    history = train_epochs(
        trained,
        objective,
        config,
        samples=len(rows),
        micros=lambda places: _micros([rows[place] for place in places], config, cost),
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
    batches = _micros(rows, config, cost_on(device_of(model), model))
    return mean_token_loss(model, batches, autocast_dtype=autocast_dtype)


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


def _micros(rows: Sequence[MaskedTokens], config: SFTConfig, cost: PassCost) -> list[TokenBatch]:
    if config.packing:
        size = min(config.micro_batch_size, max(1, cost.most // config.max_length))
        return packed_batches(rows, capacity=config.max_length, size=size)
    together = cut([row.ids for row in rows], config.micro_batch_size, cost)
    return [token_batch([rows[place] for place in places]) for places in together]


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


# --- packing


def packed_batches(rows: Sequence[MaskedTokens], *, capacity: int, size: int) -> list[TokenBatch]:
    """Return demonstrations packed into rows of at most `capacity` tokens, `size` rows to a batch.

    Args:
        rows: none longer than `capacity`.
        capacity: tokens of a row.
        size: rows that go through the model at once.
    """
    packed = [
        [rows[place] for place in places] for places in pack_rows([len(row.ids) for row in rows], capacity=capacity)
    ]
    return [_packed(packed[start : start + size]) for start in range(0, len(packed), size)]


def pack_rows(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Return the sequences of each row: first fit, longest first.

    Every sequence goes, whole, into the first row that has room for it; equal lengths keep their order, so the result
    depends on the lengths alone. First fit by decreasing length needs at most 11/9 of the fewest possible rows, plus
    6/9 of a row (Dosa 2007).

    Args:
        lengths: tokens of each sequence, at least 1.
        capacity: tokens of a row.

    Returns:
        Places in `lengths`, by row, in the order in which they stand in it.

    Raises:
        ValueError: if a sequence is longer than a row.

    Example:
        >>> pack_rows([3, 6, 4, 4], capacity=10)
        [[1, 2], [3, 0]]
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[place]
        if not 0 < length <= capacity:
            raise ValueError(f"expected sequences of 1 to {capacity} tokens, got one of {length}")
        row = next((number for number, free in enumerate(room) if free >= length), None)
        if row is None:
            rows.append([])
            room.append(capacity)
            row = len(rows) - 1
        rows[row].append(place)
        room[row] -= length
    return rows


def _packed(rows: Sequence[Sequence[MaskedTokens]]) -> TokenBatch:
    """Return rows of sequences as one batch: positions restart, and the mask is block-diagonal and causal."""
    width = max(sum(len(piece.ids) for piece in row) for row in rows)
    ids, places, learnt = (torch.zeros(len(rows), width, dtype=kind) for kind in (torch.long, torch.long, torch.bool))
    owner = torch.full((len(rows), width), -1)  # which sequence a token is of; padding is a sequence of its own,
    for number, row in enumerate(rows):  # so that no token sees nothing, which softmax would make NaN
        start = 0
        for piece_number, piece in enumerate(row):
            span = slice(start, start + len(piece.ids))
            ids[number, span] = torch.tensor(piece.ids)
            places[number, span] = torch.arange(len(piece.ids))
            learnt[number, span] = torch.tensor(piece.loss_mask, dtype=torch.bool)
            owner[number, span] = piece_number
            start = span.stop
    same = owner[:, :, None] == owner[:, None, :]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    return TokenBatch(ids, (same & causal)[:, None], places, learnt & (places > 0))


def check_packing(model: nn.Module, *, longest: int, vocabulary: int) -> None:
    """Check that this model gives packed sequences the logits that each has alone.

    One row of two sequences of random tokens goes through the model beside each of the two alone. Alibi that counts
    along the row, a sliding window shorter than the longest sequence, or attention that ignores the mask is found so,
    whatever the architecture is called.

    Args:
        model: a causal language model on its device; comes out in the mode in which it was.
        longest: tokens of the longest sequence that will be packed.
        vocabulary: number of token ids.

    Raises:
        ConfigError: if the logits differ by more than rounding, or the model does not take such a mask.
    """
    generator = torch.Generator().manual_seed(0)
    pieces = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in (longest, SHORT)]
    rows = [MaskedTokens(piece, [False] * len(piece)) for piece in pieces]
    try:
        with evaluating(model):
            packed = _logits(model, _packed([rows]), [longest, longest + SHORT])
            alone = torch.cat([_logits(model, token_batch([row]), [len(row.ids)]) for row in rows])
    except Exception as error:  # whatever an architecture raises when it is given a mask that it does not know
        raise _cannot_pack(model, f"it does not take their mask: {type(error).__name__}") from error
    difference = ((packed - alone).abs().max() / alone.abs().max()).item()
    if not difference <= _TOLERANCE.get(next(model.parameters()).dtype, _COARSE_TOLERANCE):
        raise _cannot_pack(model, f"their logits differ by {difference:.2g} of the largest from those of each alone")


@torch.no_grad()
def _logits(model: nn.Module, batch: TokenBatch, ends: Sequence[int]) -> Tensor:
    """Return the logits of the last positions before each end, in the batch's one row."""
    device = device_of(model)
    kept = torch.tensor([place for end in ends for place in range(max(end - _LAST, 0), end)])
    return kept_logits(model, batch, kept, device)[0].float()


def _cannot_pack(model: nn.Module, why: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} cannot keep packed demonstrations apart, as {why}; alibi and sliding windows do "
        "this: set sft.packing to false"
    )


# --- coati's trainer


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

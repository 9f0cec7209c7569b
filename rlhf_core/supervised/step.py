"""One optimizer step from a minibatch, whatever is supervised: shared by functions and trainers, alone or on ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from rlhf_core.errors import DataError
from rlhf_core.models.trunk import checkpoint_gradients, unwrapped
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.training.base import Metrics
from rlhf_core.training.boosted import held_back, passes, undisturbed
from rlhf_core.training.optim import Trained, take_step

Micro = TypeVar("Micro")
"""A micro-batch."""


class Objective(Protocol[Micro]):
    """What a minibatch teaches."""

    what: str
    """The model, for messages."""
    unit: str
    """What is counted and averaged over: tokens or pairs."""
    reported: tuple[str, ...]
    """Names of the means that come with the loss."""

    def count(self, micro: Micro) -> int:
        """Return how many units a micro-batch has."""

    def loss(self, model: nn.Module, micro: Micro, *, denominator: float) -> tuple[Tensor, ...]:
        """Return the micro-batch's loss, then what is reported: sums over the micro-batch, over `denominator`."""

    def idle(self) -> Micro:
        """Return the smallest micro-batch that goes through all of the model; what it says is dropped."""


def supervised_step(
    trained: Trained,
    objective: Objective[Micro],
    micros: Sequence[Micro],
    *,
    ranks: Ranks,
) -> Metrics:
    """Take one optimizer step from the micro-batches of all ranks.

    The loss is a mean over all units of all ranks: neither the cut into micro-batches nor the one into ranks changes
    it. A rank may come with fewer micro-batches than others, or with none, as long as another has some: where backward
    passes wait for all ranks it makes idle ones, which change nothing.

    Args:
        trained: the model, in the mode in which it is to be trained.
        objective: what is to be learnt.
        micros: this rank's.
        ranks: who trains together.

    Returns:
        Loss and reported means over all ranks, lr, grad_norm, and the number of units under their name.

    Raises:
        DataError: on all ranks, if there is nothing to learn on any.
        TrainingError: on all ranks, if a loss or gradient is not finite.
    """
    micros = [micro for micro in micros if objective.count(micro)]
    mine = sum(objective.count(micro) for micro in micros)
    units = ranks.sum(torch.tensor(mine)).item()
    if not units:
        raise DataError(f"a minibatch has no {objective.unit} to learn from; look at its masks and labels")
    lr = trained.scheduler.get_last_lr()[0]
    sums = torch.zeros(1 + len(objective.reported))
    count = passes(trained.booster, len(micros), ranks)
    for number in range(count):
        with held_back(trained.booster, trained.model, trained.optimizer, is_last=number == count - 1):
            if number >= len(micros):
                _idle_pass(trained, objective)
                continue
            # Gradients are averaged over ranks, not added: hence the number of ranks.
            loss, *reported = objective.loss(trained.model, micros[number], denominator=units / ranks.world_size)
            trained.booster.backward(loss, trained.optimizer)
            sums = sums.to(loss.device) + torch.stack([loss, *reported]).detach()
    means = ranks.sum(sums) / ranks.world_size
    taken = take_step(trained, loss=means[0], what=objective.what, ranks=ranks)
    named = dict(zip(("loss", *objective.reported), means.tolist(), strict=True))
    return named | {"lr": float(lr), "grad_norm": taken.norm, objective.unit: float(units)}


def _idle_pass(trained: Trained, objective: Objective[Micro]) -> None:
    """Go forward and backward for the other ranks' sake: gradients of zero, and no dropout drawn from what is next."""
    with undisturbed():
        loss, *_ = objective.loss(trained.model, objective.idle(), denominator=1.0)
        trained.booster.backward(0.0 * loss, trained.optimizer)


@contextmanager
def gradients_checkpointed(model: nn.Module, *, active: bool) -> Iterator[None]:
    """Run the block with activations computed again in the backward pass, if `active`; then keep them again.

    Args:
        model: a language model or a model on a trunk, maybe wrapped by a booster.
        active: False changes nothing.

    Raises:
        ModelError: if the architecture cannot.
    """
    if not active:
        yield
        return
    inner: Any = unwrapped(model)
    inner = getattr(inner, "trunk", inner)
    checkpoint_gradients(inner)
    try:
        yield
    finally:
        inner.gradient_checkpointing_disable()


def gather(values: Tensor, ranks: Ranks) -> Tensor:
    """Return all ranks' values, [N] in the order of the ranks, however many each has."""
    counts = torch.zeros(ranks.world_size, dtype=torch.long)
    counts[ranks.rank] = len(values)
    counts = ranks.sum(counts)
    start = int(counts[: ranks.rank].sum())
    held = torch.zeros(int(counts.sum()), dtype=values.dtype)
    held[start : start + len(values)] = values.cpu()
    return ranks.sum(held)

"""What a trainer asks of a booster: the methods of ColossalAI's `Booster` that are used here, and our own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

Precision = Literal["fp32", "bf16", "fp16"]
Moments = dict[str, dict[str, Tensor]]
"""An optimizer's tensors by moment (exp_avg, exp_avg_sq, step: torch's names), then by the weight's name."""


class Booster(Protocol):
    """Prepares a model for training, runs its backward passes, and keeps its checkpoints.

    ColossalAI's `Booster` has these methods, and more arguments of its own. An optimizer that came from `boost` owns
    whatever precision and parallelism need: unscaling, averaging over ranks, clipping.
    """

    def boost(
        self,
        model: nn.Module,
        optimizer: Any = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> Any:
        """Return (model, optimizer, criterion, dataloader, lr_scheduler), ready for training."""

    def backward(self, loss: Tensor, optimizer: Any) -> None:
        """Add the loss's gradients to the model's."""

    def no_sync(self, model: nn.Module | None = None, optimizer: Any = None) -> AbstractContextManager[Any]:
        """Return the context of backward passes whose gradients are not complete yet."""

    def save_model(
        self, model: nn.Module, checkpoint: str, shard: bool = False, *, use_safetensors: bool = False
    ) -> None:
        """Write the model's weights: to a directory if `shard`, else to one file."""

    def load_model(self, model: nn.Module, checkpoint: str, strict: bool = True) -> Any:
        """Put back what `save_model` wrote."""

    def save_optimizer(self, optimizer: Any, checkpoint: str, shard: bool = False) -> None:
        """Write the optimizer's state."""

    def load_optimizer(self, optimizer: Any, checkpoint: str) -> Any:
        """Put back what `save_optimizer` wrote."""

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str) -> None:
        """Write the schedule's state."""

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str) -> Any:
        """Put back what `save_lr_scheduler` wrote."""


class TrainedState(NamedTuple):
    """What training changes, in host memory, whole, by the names of the model that no booster has touched."""

    weights: dict[str, Tensor]
    """Trainable weights in the precision in which they are kept: float32."""
    moments: Moments
    """Of the optimizer; a weight that was never used has none. `step` is one float32 number."""


class Piece(NamedTuple):
    """What this process has of a weight."""

    name: str
    shape: torch.Size
    """Of the whole."""
    dtype: torch.dtype
    write: Callable[[Tensor], None]
    """Copies it to where it is in a whole one, which it is given; nothing, if another process speaks for it."""


class OwnBooster(Booster, Protocol):
    """A booster of this library: one for each model, which it boosts once; every method is called by all ranks.

    It says where the weights are, so that checkpoints, published weights and training states are the same whatever the
    strategy and the number of ranks.
    """

    max_norm: float | None
    """Gradients are clipped to this norm over all weights and ranks; None never clips."""
    equal_passes: bool
    """Whether backward passes communicate, so that every rank must make as many of them."""
    keeps_layers: bool
    """Whether layers stay as they were, so that they may be compiled, and attend in another way."""

    @property
    def autocast_dtype(self) -> torch.dtype:
        """The arithmetic of forward passes."""

    def new_optimizer(
        self, groups: Iterable[Mapping[str, Any]], *, betas: tuple[float, float]
    ) -> torch.optim.Optimizer:
        """Return the Adam, with decoupled weight decay, that `boost` takes for these groups of parameters."""

    def plain(self, model: nn.Module) -> nn.Module:
        """Return, of a boosted model, the model of transformers or of ours inside, for inference and for its class.

        Its weights are there while `awake` runs, in the working precision.
        """

    def awake(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return the context in which `plain(model)` holds all current weights; it must not be trained in there."""

    def weights(self, model: nn.Module, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return copies of weights in host memory, exact, by the plain model's names.

        Args:
            model: as it was boosted.
            names: trainable weights; every rank gets them. None takes all trainable ones, and only the first rank gets
                them: the others get an empty mapping.
        """

    def load_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Overwrite weights, exactly, in every place where they are kept; those that are not named stay.

        Args:
            model: as it was boosted.
            weights: whole tensors by the plain model's names, frozen ones and buffers too if they are named; the same
                on every rank. Names and shapes are the model's.
        """

    def state(self, model: nn.Module, optimizer: Any) -> TrainedState:
        """Return all trainable weights and moments on the first rank, an empty state on the others."""

    def load_state(self, model: nn.Module, optimizer: Any, state: TrainedState) -> None:
        """Put back what `state` returned, here or under another strategy or number of ranks; the same on every rank.

        Names and shapes are the model's: the caller has seen to it.
        """

    def exact(self, model: nn.Module) -> AbstractContextManager[nn.Module | None]:
        """Return the context of a plain model with the exact weights, on the first rank; of None on the others.

        It may be the model itself or a copy in host memory: it must not be changed.
        """

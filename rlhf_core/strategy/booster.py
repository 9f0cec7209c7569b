"""What a trainer asks of a booster: the methods of ColossalAI's that are used here, by its names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn


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

"""What all boosters of ours have in common: precision, ranks, and checkpoints.

A checkpoint is the same whatever the strategy and the number of ranks that wrote it: whole tensors by the plain model's
names, written by rank 0. So any strategy reads what another wrote.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

import torch
from torch import Tensor, nn

from rlhf_core.errors import ConfigError
from rlhf_core.strategy import checkpoints
from rlhf_core.strategy.booster import Moments, Precision, TrainedState
from rlhf_core.strategy.checkpoints import OptimizerState
from rlhf_core.strategy.ranks import Ranks, current_ranks, together

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class BaseBooster(ABC):
    """The part of `OwnBooster` that does not depend on where a strategy keeps weights, gradients and moments.

    Args:
        precision: of forward passes; fp16 also scales the loss.
        max_norm: gradients are clipped to this norm over all weights and ranks; None never clips.
        ranks: who trains together; None takes torch.distributed's default group, if there is one.
    """

    keeps_layers = False

    def __init__(self, precision: Precision = "fp32", max_norm: float | None = 1.0, ranks: Ranks | None = None) -> None:
        if precision not in get_args(Precision):
            raise ConfigError(f"expected precision fp32, bf16 or fp16, got {precision!r}")
        self.precision = precision
        self.max_norm = max_norm
        self.ranks = current_ranks() if ranks is None else ranks

    @property
    def autocast_dtype(self) -> torch.dtype:
        """The arithmetic that `precision` names."""
        return _DTYPES[self.precision]

    def new_optimizer(
        self, groups: Iterable[Mapping[str, Any]], *, betas: tuple[float, float]
    ) -> torch.optim.Optimizer:
        """Return torch's AdamW, fused: five times as fast as its loop, on a CPU too."""
        return torch.optim.AdamW([dict(group) for group in groups], betas=betas, fused=True)

    def no_sync(
        self,
        model: nn.Module | None = None,  # noqa: ARG002 - the protocol's
        optimizer: Any = None,  # noqa: ARG002
    ) -> AbstractContextManager[Any]:
        """Return a context that does nothing: what travels in a pass, or in a step, adds up without it."""
        return nullcontext()

    def awake(self, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002 - the protocol's
        """Return a context that does nothing: all weights are there."""
        return nullcontext()

    def save_model(
        self,
        model: nn.Module,
        checkpoint: str,
        shard: bool = False,
        gather_dtensor: bool = True,  # noqa: ARG002 - ColossalAI's, without a meaning here
        prefix: str | None = None,  # noqa: ARG002
        size_per_shard: int = 1024,
        use_safetensors: bool = True,  # noqa: ARG002 - always: nothing is pickled
    ) -> None:
        """Write the exact model from rank 0, and wait for it on all: one file, or a directory that transformers loads.

        Args:
            model: stays as it is.
            checkpoint: the file; with `shard` the directory, whose weights have the adapters merged. What an exact
                continuation needs besides, the adapters apart from what they adapt, is in a file beside them.
            shard: a directory of shards instead of one file.
            gather_dtensor: without a meaning here.
            prefix: without a meaning here.
            size_per_shard: megabytes.
            use_safetensors: always.
        """
        with self.exact(model) as whole:

            def write() -> None:
                if whole is None:
                    return
                if shard:
                    checkpoints.write_model_directory(whole, checkpoint, shard_mb=size_per_shard)
                else:
                    checkpoints.write_model_file(whole, checkpoint)

            together(self.ranks, write, what="write the checkpoint")

    def load_model(self, model: nn.Module, checkpoint: str, strict: bool = True) -> nn.Module:  # noqa: ARG002
        """Put back, to the bit, what `save_model` wrote under any strategy and number of ranks; return the model.

        Raises:
            ModelError: if it is damaged or belongs to a model of another form; nothing was changed.
        """
        plain, expected = self.plain(model), self._shapes_of(model)
        read = together(
            self.ranks, lambda: checkpoints.read_weights(plain, checkpoint, expected), what="read the checkpoint"
        )
        self.load_weights(model, read)
        return model

    def save_optimizer(
        self,
        optimizer: Any,
        checkpoint: str,
        shard: bool = False,
        gather_dtensor: bool = True,  # noqa: ARG002 - ColossalAI's, without a meaning here
        prefix: str | None = None,  # noqa: ARG002
        size_per_shard: int = 1024,  # noqa: ARG002
    ) -> None:
        """Write the optimizer's whole state from rank 0: one file of tensors with the facts in its header."""
        state = self._optimizer_state(optimizer)
        self._write_on_first(lambda: checkpoints.write_optimizer(state, checkpoint, directory=shard))

    def load_optimizer(self, optimizer: Any, checkpoint: str) -> Any:
        """Put back what `save_optimizer` wrote under any strategy and number of ranks; return the optimizer.

        Raises:
            ModelError: if it is damaged or belongs to other weights; nothing was changed.
        """
        expected = self._member_shapes(optimizer)
        read = together(
            self.ranks, lambda: checkpoints.read_optimizer(checkpoint, expected), what="read the checkpoint"
        )
        self._load_optimizer_state(optimizer, read)
        return optimizer

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str) -> None:
        """Write the schedule's state as JSON, from rank 0."""
        self._write_on_first(lambda: checkpoints.write_scheduler(lr_scheduler, checkpoint))

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str) -> None:
        """Put back what `save_lr_scheduler` wrote.

        Raises:
            ModelError: if it is damaged.
        """
        checkpoints.read_scheduler(lr_scheduler, checkpoint)

    def state(self, model: nn.Module, optimizer: Any) -> TrainedState:
        """Return all trainable weights and moments on the first rank, an empty state on the others."""
        return TrainedState(self.weights(model), self._moments(model, optimizer))

    def load_state(self, model: nn.Module, optimizer: Any, state: TrainedState) -> None:
        """Put back what `state` returned, here or under another strategy or number of ranks."""
        self.load_weights(model, state.weights)
        self._load_moments(model, optimizer, state.moments)

    @abstractmethod
    def plain(self, model: nn.Module) -> nn.Module:
        """Return, of a boosted model, the model of transformers or of ours inside."""

    @abstractmethod
    def weights(self, model: nn.Module, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return copies of trainable weights: all on the first rank, those that are named on every rank."""

    @abstractmethod
    def load_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the weights and buffers that are named, wherever they are kept."""

    @abstractmethod
    def exact(self, model: nn.Module) -> AbstractContextManager[nn.Module | None]:
        """Return the context of a plain model with the exact weights on the first rank, of None on the others."""

    @abstractmethod
    def _shapes_of(self, model: nn.Module) -> Mapping[str, torch.Size]:
        """Return the shapes of what a checkpoint of a boosted model holds."""

    @abstractmethod
    def _member_shapes(self, optimizer: Any) -> Sequence[Sequence[torch.Size]]:
        """Return the shapes of an optimizer's members, by group, as its caller built it."""

    @abstractmethod
    def _optimizer_state(self, optimizer: Any) -> OptimizerState:
        """Return what a checkpoint holds: all moments on the first rank; all ranks call."""

    @abstractmethod
    def _load_optimizer_state(self, optimizer: Any, state: OptimizerState) -> None:
        """Put back what `_optimizer_state` returned, every rank given the same."""

    @abstractmethod
    def _moments(self, model: nn.Module, optimizer: Any) -> Moments:
        """Return all moments by name, whole and in host memory, on the first rank; all ranks call."""

    @abstractmethod
    def _load_moments(self, model: nn.Module, optimizer: Any, moments: Moments) -> None:
        """Take the place of the present moments, every rank given the same."""

    def _write_on_first(self, write: Callable[[], None]) -> None:
        """Write on the first rank; the others wait for it, and fail if it did."""
        together(self.ranks, write if self.ranks.is_first else lambda: None, what="write the checkpoint")

"""The booster that needs nothing but torch: data parallelism, loss scaling, and checkpoints without pickle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from rlhf_core.errors import ConfigError
from rlhf_core.strategy import files, whole
from rlhf_core.strategy.agreement import together
from rlhf_core.strategy.booster import TrainedState
from rlhf_core.strategy.plain_optimizer import PlainOptimizer
from rlhf_core.strategy.ranks import Ranks, current_ranks

Precision = Literal["fp32", "bf16", "fp16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class PlainBooster:
    """Every rank holds the whole model; gradients are averaged once per optimizer step.

    Averaging over ranks means that a loss is its sum / (denominator over all ranks) * world_size.

    Args:
        precision: of the forward pass, for which trainers ask; fp16 also scales the loss. Weights stay float32.
        max_norm: gradients are clipped to this norm; None never clips.
        ranks: who trains together; None takes torch.distributed's default group, if there is one.
    """

    equal_passes = False

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

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[nn.Module, Any, Callable[..., Any] | None, Any, Any]:
        """Give every rank the weights of rank 0, and return all five as they are, the optimizer wrapped."""
        if self.ranks.world_size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                self.ranks.broadcast(tensor)
        wrapped = None if optimizer is None else self._wrapped(optimizer)
        return model, wrapped, criterion, dataloader, lr_scheduler

    def new_optimizer(
        self, groups: Iterable[Mapping[str, Any]], *, betas: tuple[float, float]
    ) -> torch.optim.Optimizer:
        """Return torch's AdamW, fused: five times as fast as its loop, on a CPU too."""
        return torch.optim.AdamW([dict(group) for group in groups], betas=betas, fused=True)

    def backward(self, loss: Tensor, optimizer: Any) -> None:
        """Add the loss's gradients to the model's; the optimizer may be a bare one of torch's."""
        if isinstance(optimizer, PlainOptimizer):
            optimizer.backward(loss)
        else:
            torch.autograd.backward(loss)

    def no_sync(
        self,
        model: nn.Module | None = None,  # noqa: ARG002 - the protocol's
        optimizer: Any = None,  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        """Return a context that does nothing: ranks meet only when a step is taken."""
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
        """Write the model from rank 0, and wait for it on all: one file, or a directory that transformers loads.

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

        def write() -> None:
            if shard:
                files.write_model_directory(model, checkpoint, shard_mb=size_per_shard)
            else:
                files.write_model_file(model, checkpoint)

        self._from_first(write)

    def load_model(self, model: nn.Module, checkpoint: str, strict: bool = True) -> nn.Module:  # noqa: ARG002
        """Put back what `save_model` wrote, file or directory, to the bit; return the model.

        Raises:
            ModelError: if it is damaged or belongs to a model of another form; nothing was changed.
        """
        files.read_model(model, checkpoint)
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
        """Write the optimizer's state from rank 0: one file of tensors with the facts in its header."""
        self._from_first(lambda: files.write_optimizer(optimizer, checkpoint, directory=shard))

    def load_optimizer(self, optimizer: Any, checkpoint: str) -> Any:
        """Put back what `save_optimizer` wrote; return the optimizer.

        Raises:
            ModelError: if it is damaged or belongs to other weights; nothing was changed.
        """
        files.read_optimizer(optimizer, checkpoint)
        return optimizer

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str) -> None:
        """Write the schedule's state as JSON, from rank 0."""
        self._from_first(lambda: files.write_scheduler(lr_scheduler, checkpoint))

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str) -> None:
        """Put back what `save_lr_scheduler` wrote.

        Raises:
            ModelError: if it is damaged.
        """
        files.read_scheduler(lr_scheduler, checkpoint)

    def plain(self, model: nn.Module) -> nn.Module:
        """Return the model: nothing is around it."""
        return model

    def awake(self, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002 - the protocol's
        """Return a context that does nothing: all weights are there."""
        return nullcontext()

    def weights(self, model: nn.Module, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return copies of trainable weights: all on the first rank, those that are named on every rank."""
        return whole.weights(model, names, self.ranks)

    def load_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the weights that are named."""
        whole.load_weights(model, weights)

    def state(self, model: nn.Module, optimizer: Any) -> TrainedState:
        """Return copies of all trainable weights and their moments, on the first rank."""
        if not self.ranks.is_first:
            return TrainedState({}, {})
        return TrainedState(self.weights(model), whole.moments(model, optimizer))

    def load_state(self, model: nn.Module, optimizer: Any, state: TrainedState) -> None:
        """Put back what `state` returned."""
        self.load_weights(model, state.weights)
        whole.load_moments(model, optimizer, state.moments)

    def exact(self, model: nn.Module) -> AbstractContextManager[nn.Module | None]:
        """Return the context of the model itself on the first rank, of None on the others."""
        return nullcontext(model if self.ranks.is_first else None)

    def _from_first(self, write: Callable[[], None]) -> None:
        """Write on the first rank; the others wait for it, and fail if it did."""
        together(self.ranks, write if self.ranks.is_first else lambda: None, what="write the checkpoint")

    def _wrapped(self, optimizer: torch.optim.Optimizer) -> PlainOptimizer:
        return PlainOptimizer(optimizer, max_norm=self.max_norm, ranks=self.ranks, scaled=self.precision == "fp16")

"""What all boosters over ColossalAI's plugins have in common: boosting, checkpoints, states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_core.errors import ConfigError
from rlhf_core.models.lora import trainable_parameters
from rlhf_core.strategy import files
from rlhf_core.strategy.booster import TrainedState
from rlhf_core.strategy.colossal.compat import upstream
from rlhf_core.strategy.colossal.compat.loading import quiet
from rlhf_core.strategy.colossal.optimizer import ColossalOptimizer, Members
from rlhf_core.strategy.plain import Precision
from rlhf_core.strategy.ranks import Ranks, current_ranks, together

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class ColossalBooster(ABC):
    """Wraps ColossalAI's `Booster` with one plugin; for one model.

    Checkpoints are ours, the same for every strategy: whole tensors by the plain model's names, written by rank 0.

    Args:
        precision: as the plugin understands it.
        max_norm: gradients are clipped to this norm over all weights and ranks; None never clips.
        ranks: who trains together; None takes torch.distributed's default group, which the plugin takes in any case.
    """

    equal_passes = True

    def __init__(self, precision: Precision = "fp32", max_norm: float | None = 1.0, ranks: Ranks | None = None) -> None:
        if precision not in get_args(Precision):
            raise ConfigError(f"expected precision fp32, bf16 or fp16, got {precision!r}")
        if precision == "fp16" and not torch.cuda.is_available():
            raise ConfigError("precision fp16 needs a GPU, and there is none; take bf16, or fp32")
        if not dist.is_initialized():
            raise ConfigError(
                "ColossalAI's strategies need a process group, also of one process; call "
                "rlhf_core.strategy.ranks.join (under torchrun) or join_alone first"
            )
        self.precision = precision
        self.max_norm = max_norm
        self.ranks = current_ranks() if ranks is None else ranks
        with quiet():
            self.upstream = upstream("colossalai.booster").Booster(plugin=self._plugin())
        self._shapes: dict[str, torch.Size] = {}

    @property
    def autocast_dtype(self) -> torch.dtype:
        """The arithmetic that `precision` names."""
        return _DTYPES[self.precision]

    @abstractmethod
    def _plugin(self) -> Any:
        """Return ColossalAI's plugin."""

    @abstractmethod
    def _adapted(self, optimizer: Any, members: Members) -> ColossalOptimizer:
        """Return the adapter of the plugin's optimizer."""

    @abstractmethod
    def plain(self, model: nn.Module) -> nn.Module:
        """Return, of a boosted model, the model of transformers or of ours inside."""

    @abstractmethod
    def weights(self, model: nn.Module, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return copies of trainable weights: all on the first rank, those that are named on every rank."""

    @abstractmethod
    def load_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the weights and buffers that are named, and the masters of these weights."""

    @abstractmethod
    def exact(self, model: nn.Module) -> AbstractContextManager[nn.Module | None]:
        """Return the context of a plain model with the exact weights on the first rank, of None on the others."""

    def awake(self, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002 - the protocol's
        """Return a context that does nothing: all weights are there."""
        return nullcontext()

    def new_optimizer(
        self, groups: Iterable[Mapping[str, Any]], *, betas: tuple[float, float]
    ) -> torch.optim.Optimizer:
        """Return torch's AdamW, fused."""
        return torch.optim.AdamW([dict(group) for group in groups], betas=betas, fused=True)

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[nn.Module, Any, Callable[..., Any] | None, Any, Any]:
        """Give every rank the weights of rank 0, and let the plugin wrap the model and shard the optimizer."""
        if self._shapes:
            raise ConfigError("this booster has a model already; make one booster for each model")
        members = None if optimizer is None else _members(model, optimizer)
        for tensor in (*model.parameters(), *model.buffers()):
            self.ranks.broadcast(tensor)
        self._shapes = files.shapes(model)
        boosted, wrapped = self._boosted(model, optimizer)
        adapted = None if members is None else self._adapted(wrapped, members)
        return boosted, adapted, criterion, dataloader, lr_scheduler

    def _boosted(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[nn.Module, Any]:
        """Let ColossalAI's booster wrap both."""
        with quiet():
            boosted, wrapped, *_ = self.upstream.boost(model, optimizer)
        return boosted, wrapped

    def backward(self, loss: Tensor, optimizer: Any) -> None:
        """Add the loss's gradients to the model's, averaged over ranks."""
        self.upstream.backward(loss, optimizer)

    def no_sync(
        self,
        model: nn.Module | None = None,  # noqa: ARG002 - the protocol's
        optimizer: Any = None,  # noqa: ARG002
    ) -> AbstractContextManager[Any]:
        """Return a context that does nothing: gradients are averaged in every pass, and added up."""
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
        """Write the exact model from rank 0, and wait for it on all; as `PlainBooster.save_model` does."""
        with self.exact(model) as whole:

            def write() -> None:
                if whole is None:
                    return
                if shard:
                    files.write_model_directory(whole, checkpoint, shard_mb=size_per_shard)
                else:
                    files.write_model_file(whole, checkpoint)

            together(self.ranks, write, what="write the checkpoint")

    def load_model(self, model: nn.Module, checkpoint: str, strict: bool = True) -> nn.Module:  # noqa: ARG002
        """Put back what `save_model` wrote under any strategy and number of ranks; return the model.

        Raises:
            ModelError: if it is damaged or belongs to a model of another form; nothing was changed.
        """
        plain = self.plain(model)
        read = together(
            self.ranks, lambda: files.read_weights(plain, checkpoint, self._shapes), what="read the checkpoint"
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
        """Write the optimizer's whole state from rank 0; as `PlainBooster.save_optimizer` does."""
        state = self._checked(optimizer).whole_state()

        def write() -> None:
            if self.ranks.is_first:
                files.write_optimizer_state(state, checkpoint, directory=shard)

        together(self.ranks, write, what="write the checkpoint")

    def load_optimizer(self, optimizer: Any, checkpoint: str) -> Any:
        """Put back what `save_optimizer` wrote under any strategy and number of ranks; return the optimizer.

        Raises:
            ModelError: if it is damaged or belongs to other weights; nothing was changed.
        """
        checked = self._checked(optimizer)
        shapes = checked.by_group([self._shapes[name] for name in checked.names])
        read = together(self.ranks, lambda: files.read_optimizer_state(checkpoint, shapes), what="read the checkpoint")
        checked.load_whole_state(read)
        return optimizer

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str) -> None:
        """Write the schedule's state as JSON, from rank 0."""

        def write() -> None:
            if self.ranks.is_first:
                files.write_scheduler(lr_scheduler, checkpoint)

        together(self.ranks, write, what="write the checkpoint")

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str) -> None:
        """Put back what `save_lr_scheduler` wrote.

        Raises:
            ModelError: if it is damaged.
        """
        files.read_scheduler(lr_scheduler, checkpoint)

    def state(self, model: nn.Module, optimizer: Any) -> TrainedState:
        """Return all trainable weights and moments on the first rank, an empty state on the others."""
        return TrainedState(self.weights(model), self._checked(optimizer).moments())

    def load_state(self, model: nn.Module, optimizer: Any, state: TrainedState) -> None:
        """Put back what `state` returned, here or under another strategy or number of ranks."""
        self.load_weights(model, state.weights)
        self._checked(optimizer).load_moments(state.moments)

    def _checked(self, optimizer: Any) -> ColossalOptimizer:
        if not isinstance(optimizer, ColossalOptimizer):
            raise ConfigError(
                f"expected the optimizer that this booster's boost returned, got {type(optimizer).__name__}"
            )
        return optimizer


def _members(model: nn.Module, optimizer: torch.optim.Optimizer) -> Members:
    """Return the names of the optimizer's members.

    Raises:
        ConfigError: if they are not the model's trainable weights.
    """
    own = {parameter: name for name, parameter in trainable_parameters(model).items()}
    members = [member for group in optimizer.param_groups for member in group["params"]]
    strange = sum(member not in own for member in members)
    if strange or len(members) < len(own):
        raise ConfigError(
            f"expected the optimizer to have the {len(own)} trainable weights of the {type(model).__name__} that is "
            f"boosted with it, got {len(members) - strange} of them and {strange} others; build it from all parameters "
            "that require a gradient, and no others"
        )
    return Members([own[member] for member in members], [len(group["params"]) for group in optimizer.param_groups])

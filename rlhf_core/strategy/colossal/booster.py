"""What all boosters over ColossalAI's plugins have in common: boosting, and the adapter of the plugin's optimizer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_core.errors import ConfigError
from rlhf_core.models.base import own_tensors
from rlhf_core.models.lora import trainable_parameters
from rlhf_core.strategy import checkpoints
from rlhf_core.strategy.base_booster import BaseBooster
from rlhf_core.strategy.booster import Moments, Precision
from rlhf_core.strategy.checkpoints import SETTINGS, OptimizerState
from rlhf_core.strategy.colossal.compat import upstream
from rlhf_core.strategy.colossal.compat.loading import quiet
from rlhf_core.strategy.optimizer import CheckedOptimizer
from rlhf_core.strategy.ranks import Ranks

T = TypeVar("T")


class Members(NamedTuple):
    """An optimizer's weights as its caller grouped them."""

    names: list[str]
    """By number: group by group."""
    sizes: list[int]
    """Of the groups."""


class ColossalOptimizer(CheckedOptimizer):
    """Adapts a plugin's optimizer, which averages gradients as they come and steps; this checks and clips them.

    Args:
        inner: the plugin's `OptimizerWrapper`.
        members: of its groups, before the plugin put shards in their place.
        max_norm: gradients are clipped to this norm over all weights and ranks; None never clips.
        scaled: whether losses are scaled for float16.
        ranks: who trains together.
    """

    def __init__(self, inner: Any, *, members: Members, max_norm: float | None, scaled: bool, ranks: Ranks) -> None:
        super().__init__(max_norm=max_norm, ranks=ranks, scaled=scaled)
        self.inner = inner
        self.names, self._sizes = members

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer inside; a schedule sets their learning rates."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    @property
    def group_sizes(self) -> list[int]:
        """How many weights each group has as the caller built it, whatever part of them this rank holds."""
        return list(self._sizes)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 - always: zeros would be stepped with
        """Forget the gradients."""
        super().zero_grad()
        self.inner.zero_grad()

    def by_group(self, members: Sequence[T]) -> list[list[T]]:
        """Cut a list with an entry for each member, in the order of `names`, into groups."""
        left = iter(members)
        return [list(islice(left, size)) for size in self._sizes]

    def whole_state(self) -> OptimizerState:
        """Return what a checkpoint holds: all moments on the first rank, none on the others."""
        state: dict[int, dict[str, Tensor]] = {}
        numbers = {name: number for number, name in enumerate(self.names)}
        for moment, held in self.moments().items():
            for name, tensor in held.items():
                state.setdefault(numbers[name], {})[moment] = tensor
        groups = [
            {key: group[key] for key in SETTINGS if key in group} | {"params": members}
            for group, members in zip(self.param_groups, self.by_group(range(len(self.names))), strict=True)
        ]
        facts: dict[str, Any] = {"param_groups": groups}
        if self.scale is not None:
            facts["loss_scale"] = self.scale.facts()
        return OptimizerState(state, facts)

    def load_whole_state(self, state: OptimizerState) -> None:
        """Put back what `whole_state` returned on the first rank, every rank given the same."""
        moments: Moments = {}
        for number, held in state.moments.items():
            for moment, tensor in held.items():
                moments.setdefault(moment, {})[self.names[number]] = torch.as_tensor(tensor)
        self.load_moments(moments)
        for group, facts in zip(self.param_groups, state.facts["param_groups"], strict=True):
            group |= {key: facts[key] for key in SETTINGS if key in facts}
        if self.scale is not None and "loss_scale" in state.facts:
            self.scale.load(state.facts["loss_scale"])

    @abstractmethod
    def moments(self) -> Moments:
        """Return the moments of all weights, whole and in host memory, on the first rank; all ranks call."""

    @abstractmethod
    def load_moments(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take the place of the present moments, every rank given the same whole ones; weights not named have none."""

    def _backward(self, loss: Tensor) -> None:
        self.inner.backward(loss)

    def _step(self) -> None:
        self.inner.step()

    def _load_into(
        self,
        optim: torch.optim.Optimizer,
        moments: Mapping[str, Mapping[str, Tensor]],
        cut: Callable[[Tensor], Tensor] = torch.clone,
    ) -> None:
        """Give moments to a torch optimizer, which knows its members by number; `cut` copies what this rank holds."""
        numbers = {name: number for number, name in enumerate(self.names)}
        state: dict[int, dict[str, Tensor]] = {}
        for moment, held in moments.items():
            for name, tensor in held.items():
                state.setdefault(numbers[name], {})[moment] = tensor.clone() if moment == "step" else cut(tensor)
        optim.load_state_dict({"state": state, "param_groups": optim.state_dict()["param_groups"]})


class ColossalBooster(BaseBooster):
    """Wraps ColossalAI's `Booster` with one plugin; for one model.

    Args:
        precision: as the plugin understands it.
        max_norm: gradients are clipped to this norm over all weights and ranks; None never clips.
        ranks: who trains together; None takes torch.distributed's default group, which the plugin takes in any case.
    """

    equal_passes = True

    def __init__(self, precision: Precision = "fp32", max_norm: float | None = 1.0, ranks: Ranks | None = None) -> None:
        super().__init__(precision, max_norm, ranks)
        if precision == "fp16" and not torch.cuda.is_available():
            raise ConfigError("precision fp16 needs a GPU, and there is none; take bf16, or fp32")
        if not dist.is_initialized():
            raise ConfigError(
                "ColossalAI's strategies need a process group, also of one process; call "
                "rlhf_core.strategy.ranks.join (under torchrun) or join_alone first"
            )
        with quiet():
            self.upstream = upstream("colossalai.booster").Booster(plugin=self._plugin())
        self._shapes: dict[str, torch.Size] = {}

    @abstractmethod
    def _plugin(self) -> Any:
        """Return ColossalAI's plugin."""

    @abstractmethod
    def _adapted(self, optimizer: Any, members: Members) -> ColossalOptimizer:
        """Return the adapter of the plugin's optimizer."""

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
        for tensor in own_tensors(model):
            self.ranks.broadcast(tensor)
        self._shapes = checkpoints.shapes(model)
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

    def _shapes_of(self, model: nn.Module) -> Mapping[str, torch.Size]:  # noqa: ARG002 - one booster, one model
        return self._shapes

    def _member_shapes(self, optimizer: Any) -> Sequence[Sequence[torch.Size]]:
        checked = _checked(optimizer)
        return checked.by_group([self._shapes[name] for name in checked.names])

    def _optimizer_state(self, optimizer: Any) -> OptimizerState:
        return _checked(optimizer).whole_state()

    def _load_optimizer_state(self, optimizer: Any, state: OptimizerState) -> None:
        _checked(optimizer).load_whole_state(state)

    def _moments(self, model: nn.Module, optimizer: Any) -> Moments:  # noqa: ARG002
        return _checked(optimizer).moments()

    def _load_moments(self, model: nn.Module, optimizer: Any, moments: Moments) -> None:  # noqa: ARG002
        _checked(optimizer).load_moments(moments)


def _checked(optimizer: Any) -> ColossalOptimizer:
    if not isinstance(optimizer, ColossalOptimizer):
        raise ConfigError(f"expected the optimizer that this booster's boost returned, got {type(optimizer).__name__}")
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

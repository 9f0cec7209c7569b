"""The booster that needs nothing but torch: every rank holds the whole model, each step averages the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.models.base import own_tensors
from rlhf_core.models.lora import trainable_parameters
from rlhf_core.strategy import checkpoints
from rlhf_core.strategy.base_booster import BaseBooster
from rlhf_core.strategy.booster import Moments
from rlhf_core.strategy.checkpoints import OptimizerState
from rlhf_core.strategy.optimizer import CheckedOptimizer
from rlhf_core.strategy.ranks import Ranks

BUCKET_ELEMENTS = 1 << 26
"""Gradients that travel together, cut where they pass this: averaging takes 256 MB of memory for float32."""


class PlainOptimizer(CheckedOptimizer):
    """Wraps a torch optimizer; every step is one of all ranks.

    Args:
        optim: the optimizer; its schedule stays attached to it.
        max_norm: gradients are scaled down to this norm, over all weights; None never clips.
        ranks: who trains together.
        scaled: whether losses are scaled for float16.
    """

    def __init__(
        self, optim: torch.optim.Optimizer, *, max_norm: float | None, ranks: Ranks, scaled: bool = False
    ) -> None:
        super().__init__(max_norm=max_norm, ranks=ranks, scaled=scaled)
        self.optim = optim

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state by parameter."""
        return self.optim.state

    def parameters(self) -> list[nn.Parameter]:
        """Return all that is trained, in the order of the groups."""
        return [member for group in self.optim.param_groups for member in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        super().zero_grad(set_to_none)
        self.optim.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and the loss scale where there is one."""
        state: dict[str, Any] = self.optim.state_dict()
        if self.scale is not None:
            state["loss_scale"] = self.scale.facts()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        state = dict(state_dict)
        held = state.pop("loss_scale", None)
        if self.scale is not None and held is not None:
            self.scale.load(held)
        self.optim.load_state_dict(state)

    def _backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)

    def _global_norm(self) -> float:
        parameters = self.parameters()
        average(parameters, self.ranks)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.scale is not None:
            for gradient in gradients:
                gradient.div_(self.scale.factor)
        self._total = nn.utils.get_total_norm(gradients)
        return self._total.item()  # the one wait for the device

    def _clip(self, limit: float | None) -> None:
        if limit is not None:
            nn.utils.clip_grads_with_norm_(self.parameters(), limit, self._total)

    def _step(self) -> None:
        self.optim.step()


def average(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Replace every gradient by its mean over ranks; a rank without one counts as zero."""
    if ranks.everyone.world_size == 1:
        return
    members = list(parameters)
    # A weight that no process used keeps no gradient, as on one rank: with one, weight decay would move it.
    used = ranks.everyone.max(torch.tensor([int(member.grad is not None) for member in members])).tolist()
    gradients = [_flat_gradient(member) for member, is_used in zip(members, used, strict=True) if is_used]
    add_up(gradients, ranks, divisor=ranks.world_size)


def add_up(gradients: Iterable[Tensor], ranks: Ranks, *, divisor: int = 1) -> None:
    """Overwrite flat gradients, in buckets, with their sums over ranks, divided."""
    if ranks.world_size == 1:
        return
    for bucket in _buckets(gradients):
        flat = torch.cat(bucket)
        ranks.add_up(flat)
        flat.div_(divisor)
        for piece, total in zip(bucket, torch.split(flat, [piece.numel() for piece in bucket]), strict=True):
            piece.copy_(total)


def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    """Return a flat view of the weight's gradient, which is given one if it has none."""
    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
    return parameter.grad.view(-1)


def _buckets(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    """Cut flat gradients into pieces, and group those of one dtype and device, in their order, up to a bounded size."""
    buckets: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    for gradient in gradients:
        kind, rest = (gradient.dtype, gradient.device), gradient
        while rest.numel():
            if not room.get(kind):
                buckets.setdefault(kind, []).append([])
                room[kind] = BUCKET_ELEMENTS
            piece, rest = rest[: room[kind]], rest[room[kind] :]
            buckets[kind][-1].append(piece)
            room[kind] -= piece.numel()
    return [bucket for kind in buckets.values() for bucket in kind]


def weights(model: nn.Module, names: Sequence[str] | None, ranks: Ranks, *, copied: bool = True) -> dict[str, Tensor]:
    """Return the named trainable weights, or all of them on the first rank, in host memory.

    Args:
        model: of transformers or of ours.
        names: None: all.
        ranks: who trains together.
        copied: False: what is in host memory already is returned itself.
    """
    own = trainable_parameters(model)
    wanted = names if names is not None else own if ranks.is_first else ()
    return {name: own[name].detach().to("cpu", copy=copied) for name in wanted}


def load_weights(model: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Copy whole tensors over the model's parameters and buffers of these names."""
    own: dict[str, Tensor] = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor)


def moments(model: nn.Module, optimizer: Any, *, copied: bool = True) -> Moments:
    """Return an optimizer's tensors by moment and weight, in host memory, as `weights` does."""
    found: Moments = {}
    for name, parameter in trainable_parameters(model).items():
        for moment, tensor in optimizer.state[parameter].items():
            found.setdefault(moment, {})[name] = tensor.detach().to("cpu", copy=copied)
    return found


def load_moments(model: nn.Module, optimizer: Any, given: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Give the optimizer its moments, which it knows by number, by name."""
    names = {parameter: name for name, parameter in trainable_parameters(model).items()}
    members = [member for group in optimizer.param_groups for member in group["params"]]
    covered = {name for held in given.values() for name in held}
    state = {
        # Cloned: the optimizer writes into what it is given.
        number: {moment: held[names[member]].clone() for moment, held in given.items()}
        for number, member in enumerate(members)
        if names[member] in covered
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def load_optimizer_state(optimizer: Any, state: OptimizerState) -> None:
    """Give the optimizer its moments by number, and the settings of its groups."""
    own = optimizer.state_dict()["param_groups"]
    groups = [mine | theirs for mine, theirs in zip(own, state.facts["param_groups"], strict=True)]
    optimizer.load_state_dict(state.facts | {"param_groups": groups, "state": state.moments})


class PlainBooster(BaseBooster):
    """Every rank holds the whole model; gradients are averaged once per optimizer step.

    Averaging over ranks means that a loss is its sum / (denominator over all ranks) * world_size.

    Args:
        precision: of the forward pass, for which trainers ask; fp16 also scales the loss. Weights stay float32.
        max_norm: gradients are clipped to this norm; None never clips.
        ranks: who trains together; None takes torch.distributed's default group, if there is one.
    """

    equal_passes = False
    keeps_layers = True

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[nn.Module, Any, Callable[..., Any] | None, Any, Any]:
        """Give every rank the weights of rank 0, and return all five as they are, the optimizer wrapped."""
        for tensor in own_tensors(model):
            self.ranks.broadcast(tensor)
        wrapped = None
        if optimizer is not None:
            scaled = self.precision == "fp16"
            wrapped = PlainOptimizer(optimizer, max_norm=self.max_norm, ranks=self.ranks, scaled=scaled)
        return model, wrapped, criterion, dataloader, lr_scheduler

    def backward(self, loss: Tensor, optimizer: Any) -> None:
        """Add the loss's gradients to the model's; the optimizer may be a bare one of torch's."""
        if isinstance(optimizer, PlainOptimizer):
            optimizer.backward(loss)
        else:
            torch.autograd.backward(loss)

    def plain(self, model: nn.Module) -> nn.Module:
        """Return the model: nothing is around it."""
        return model

    def weights(self, model: nn.Module, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return copies of trainable weights: all on the first rank, those that are named on every rank."""
        return weights(model, names, self.ranks)

    def load_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the weights that are named."""
        load_weights(model, weights)

    def exact(self, model: nn.Module) -> AbstractContextManager[nn.Module | None]:
        """Return the context of the model itself on the first rank, of None on the others."""
        return nullcontext(self.plain(model) if self.ranks.is_first else None)

    def _shapes_of(self, model: nn.Module) -> Mapping[str, torch.Size]:
        return checkpoints.shapes(self.plain(model))

    def _member_shapes(self, optimizer: Any) -> Sequence[Sequence[torch.Size]]:
        return [[member.shape for member in group["params"]] for group in optimizer.param_groups]

    def _optimizer_state(self, optimizer: Any) -> OptimizerState:
        facts = dict(optimizer.state_dict())
        return OptimizerState(facts.pop("state"), facts)

    def _load_optimizer_state(self, optimizer: Any, state: OptimizerState) -> None:
        load_optimizer_state(optimizer, state)

    def _moments(self, model: nn.Module, optimizer: Any) -> Moments:
        return moments(model, optimizer) if self.ranks.is_first else {}

    def _load_moments(self, model: nn.Module, optimizer: Any, moments: Moments) -> None:
        load_moments(model, optimizer, moments)

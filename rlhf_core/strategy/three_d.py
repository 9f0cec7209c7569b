"""The strategy `3d`: models in parts over neighbouring processes, and several such groups with rows of their own."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.errors import ConfigError
from rlhf_core.models.base import own_tensors
from rlhf_core.models.lora import trainable_parameters
from rlhf_core.strategy import checkpoints, plain
from rlhf_core.strategy.base_booster import BaseBooster
from rlhf_core.strategy.booster import Moments, Piece, Precision
from rlhf_core.strategy.checkpoints import OptimizerState
from rlhf_core.strategy.plain import PlainOptimizer
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.strategy.tensor_parallel import Division
from rlhf_core.strategy.twin import Twin, host_copy

_COUNTER = "step"  # the moment that is one number, whatever the weight


class ThreeDOptimizer(PlainOptimizer):
    """Steps on this process's parts, from gradients of all rows and the norm of the whole model.

    Args:
        optim: over the parts.
        division: of the model.
        names: of all weights.
        max_norm: gradients are clipped to this norm over the whole model; None never clips.
        ranks: who trains together.
        scaled: whether losses are scaled for float16.
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        *,
        division: Division,
        names: Mapping[nn.Parameter, str],
        max_norm: float | None,
        ranks: Ranks,
        scaled: bool,
    ) -> None:
        super().__init__(optim, max_norm=max_norm, ranks=ranks, scaled=scaled)
        self._division, self.names = division, names

    def _global_norm(self) -> float:
        members = self.parameters()
        plain.average(members, self.ranks)
        gradients = {self.names[member]: member.grad for member in members if member.grad is not None}
        of_tokens = {name: each for name, each in gradients.items() if self._division.in_layer(name)}
        self._agree(of_tokens, self._division.copies, of_tokens)
        for among in dict.fromkeys((self.ranks.tensor, self.ranks.shards)):
            alike = {name: each for name, each in gradients.items() if self._division.alike(name) is among}
            self._agree(alike, among, self._division.summed)
        for gradient in gradients.values() if self.scale is not None else ():
            gradient.div_(self._factor)
        counted = [gradient for name, gradient in gradients.items() if self._division.counts(name)]
        self._total = self.ranks.shards.sum(nn.utils.get_total_norm(counted).to(members[0].device) ** 2).sqrt()
        return self._total.item()  # the one wait for the device

    @staticmethod
    def _agree(gradients: Mapping[str, Tensor], among: Ranks, summed: Container[str]) -> None:
        """Give weights that several processes have the same gradients on each, to the bit.

        Args:
            gradients: by name.
            among: the processes.
            summed: of which each process knows its share; of the others all, as far as its arithmetic can be repeated.
        """
        if among.world_size == 1:
            return
        for name, gradient in gradients.items():
            if name not in summed:
                gradient.div_(among.world_size)
        plain.add_up((gradient.view(-1) for gradient in gradients.values()), among)


class ThreeDBooster(BaseBooster):
    """Of every matrix a process has its part; a group of `ranks.shards` holds one model, and has rows of its own.

    Outside forward passes a part means nothing: `plain` is a twin that `awake` gives whole weights.

    Args:
        precision: of the forward pass, for which trainers ask; fp16 also scales the loss. Weights stay float32.
        max_norm: gradients are clipped to this norm over the whole model; None never clips.
        ranks: who trains together, laid out; None takes torch.distributed's default group, of which each has a model.
    """

    equal_passes = False
    _twin: Twin
    _division: Division

    def __init__(self, precision: Precision = "fp32", max_norm: float | None = 1.0, ranks: Ranks | None = None) -> None:
        super().__init__(precision, max_norm, ranks)
        self._shapes: dict[str, torch.Size] = {}

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[nn.Module, Any, Callable[..., Any] | None, Any, Any]:
        """Give every process the weights of the first, cut the model in place, and return all five.

        Raises:
            ConfigError: if the model cannot be cut, or this booster has one.
        """
        if self._shapes:
            raise ConfigError("this booster has a model already; make one booster for each model")
        division = Division(model, self.ranks)
        for tensor in own_tensors(model):
            self.ranks.broadcast(tensor)
        self._shapes = checkpoints.shapes(model)
        self._division, self._twin = division, Twin(model, {name for name, _ in division.own(model)})
        division.cut_model(model)
        wrapped = None
        if optimizer is not None:
            names = {parameter: name for name, parameter in model.named_parameters()}
            wrapped = ThreeDOptimizer(
                optimizer, division=division, names=names, max_norm=self.max_norm, ranks=self.ranks,
                scaled=self.precision == "fp16",
            )  # fmt: skip
        return model, wrapped, criterion, dataloader, lr_scheduler

    def backward(self, loss: Tensor, optimizer: Any) -> None:
        """Add the loss's gradients to the model's."""
        optimizer.backward(loss)
        if (pipeline := self._division.pipeline) is not None:
            pipeline.settle()

    def plain(self, model: nn.Module) -> nn.Module:  # noqa: ARG002 - the protocol's
        """Return the twin; outside `awake` what is cut is not numbers in it."""
        return self._twin.model

    def awake(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return the context in which the twin has all weights; then they are freed."""
        return self._twin.awake(
            lambda: ((name, self._division.whole(name, part)) for name, part in self._division.own(model))
        )

    def weights(self, model: nn.Module, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Return copies of trainable weights: all on the first process, those that are named on every one."""
        own = trainable_parameters(model)
        return self._wholes({name: own[name] for name in (own if names is None else names)}, on_all=names is not None)

    def pieces(self, model: nn.Module, *, trained_only: bool) -> Iterator[Piece]:
        """Yield, of each weight of the model, what this process has of it; all processes the same ones.

        Args:
            model: as it was boosted.
            trained_only: leave out what is frozen.
        """

        def write(name: str, own: nn.Parameter, whole: Tensor) -> None:
            if self._division.counts(name):
                self._division.part(name, whole).copy_(own.detach())

        for name, own in trainable_parameters(model).items() if trained_only else model.named_parameters():
            yield Piece(name, self._division.shape(name, own), own.dtype, partial(write, name, own))

    def load_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Overwrite this process's parts of the weights that are named, and buffers."""
        plain.load_weights(model, {name: self._division.part(name, tensor) for name, tensor in weights.items()})

    @contextmanager
    def exact(self, model: nn.Module) -> Iterator[nn.Module | None]:
        """Return the context of a copy in host memory on the first process, of None on the others."""
        found = self._wholes(dict(self._division.own(model)))

        def tensor_for(name: str, tensor: Tensor) -> Tensor:
            return found[name] if name in found else tensor.cpu()  # a base stays where it is mapped

        yield host_copy(self._twin.model, tensor_for) if self.ranks.is_first else None

    def _wholes(self, parts: Mapping[str, Tensor], *, on_all: bool = False) -> dict[str, Tensor]:
        """Return whole tensors in host memory, on the first process or on all; only its model's parts are asked."""
        found = {}
        for name, part in parts.items() if on_all or self.ranks.rank == 0 else ():
            whole = self._division.whole(name, part)
            if on_all or self.ranks.is_first:
                found[name] = whole.to("cpu", copy=True)
        return found

    def _shapes_of(self, model: nn.Module) -> Mapping[str, torch.Size]:  # noqa: ARG002 - one booster, one model
        return self._shapes

    def _member_shapes(self, optimizer: Any) -> Sequence[Sequence[torch.Size]]:
        names = optimizer.names
        return [[self._shapes[names[member]] for member in group["params"]] for group in optimizer.param_groups]

    def _optimizer_state(self, optimizer: Any) -> OptimizerState:
        facts = dict(optimizer.state_dict())
        names = [optimizer.names[member] for member in optimizer.parameters()]
        state: dict[int, dict[str, Tensor]] = {}
        for number, held in facts.pop("state").items():
            for moment, tensor in held.items():
                for whole in [tensor] if moment == _COUNTER else self._wholes({names[number]: tensor}).values():
                    state.setdefault(number, {})[moment] = whole
        return OptimizerState(state, facts)

    def _load_optimizer_state(self, optimizer: Any, state: OptimizerState) -> None:
        names = [optimizer.names[member] for member in optimizer.parameters()]
        parts = {
            number: {moment: self._part(names[number], moment, tensor) for moment, tensor in held.items()}
            for number, held in state.moments.items()
        }
        plain.load_optimizer_state(optimizer, state._replace(moments=parts))

    def _moments(self, model: nn.Module, optimizer: Any) -> Moments:
        found: Moments = {}
        for name, parameter in trainable_parameters(model).items():
            for moment, tensor in optimizer.state[parameter].items():
                whole = {name: tensor.to("cpu", copy=True)} if moment == _COUNTER else self._wholes({name: tensor})
                found.setdefault(moment, {}).update(whole)
        return found if self.ranks.is_first else {}

    def _load_moments(self, model: nn.Module, optimizer: Any, moments: Moments) -> None:
        parts = {
            moment: {name: self._part(name, moment, tensor) for name, tensor in held.items()}
            for moment, held in moments.items()
        }
        plain.load_moments(model, optimizer, parts)

    def _part(self, name: str, moment: str, tensor: Any) -> Any:
        """Return this process's part of a moment, in memory of its own: the optimizer keeps what it is given."""
        if moment == _COUNTER or not isinstance(tensor, Tensor):
            return tensor
        return self._division.part(name, tensor).clone(memory_format=torch.contiguous_format)

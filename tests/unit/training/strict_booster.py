# ruff: noqa: ARG002 - arguments are the protocol's
"""A booster that forgives nothing which a sharding one could not do, on one process or several.

Passes meet in a collective, and must be of one kind on all ranks. Weights are NaN but in a pass, a step, or `awake`.
Parameters in the optimizer's groups, and its state, cannot be seen. The model is wrapped.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.models.lora import trainable_parameters
from rlhf_core.strategy import plain
from rlhf_core.strategy.booster import TrainedState
from rlhf_core.strategy.optimizer import CheckedOptimizer
from rlhf_core.strategy.plain import PlainBooster, PlainOptimizer
from rlhf_core.strategy.ranks import ALONE

NAN = float("nan")


class Wrapper(nn.Module):
    """What a plugin puts around a model."""

    def __init__(self, module: nn.Module, booster: StrictBooster) -> None:
        super().__init__()
        self.module = module
        self._booster = [booster]

    def forward(self, *arguments: Any, **named: Any) -> Any:
        with self._booster[0].forward():
            return self.module(*arguments, **named)


class StrictBooster(PlainBooster):
    equal_passes = True

    def boost(self, model: Any, optimizer: Any = None, *others: Any, lr_scheduler: Any = None, **named: Any) -> Any:
        assert not hasattr(self, "inner"), "one booster for each model"
        self.inner = model
        self.twin = copy.deepcopy(model)
        self.passes: list[str] = []
        """What went through the model: forward with and without a gradient, backward."""
        self.is_awake = self.waits = False
        model, wrapped, *rest = super().boost(model, optimizer, *others, lr_scheduler=lr_scheduler, **named)
        self.masters = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        self._hide(self.inner)
        self._hide(self.twin)
        return Wrapper(model, self), None if wrapped is None else StrictOptimizer(wrapped, self), *rest

    def backward(self, loss: Tensor, optimizer: Any) -> None:
        self._meet("backward")
        assert self.waits == self.waited_forward, "no_sync covers forward and backward"
        super().backward(loss, optimizer.optim)
        self._hide(self.inner)

    @contextmanager
    def no_sync(self, model: nn.Module | None = None, optimizer: Any = None) -> Iterator[None]:
        self.waits = True
        yield
        self.waits = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        assert not self.is_awake, "a model is not trained while it is awake"
        self._meet(f"forward {torch.is_grad_enabled()}")
        self.waited_forward = self.waits
        self.show()
        yield
        if not torch.is_grad_enabled():
            self._hide(self.inner)

    def plain(self, model: nn.Module) -> nn.Module:
        assert model.module is self.inner
        return self.twin

    @contextmanager
    def awake(self, model: nn.Module) -> Iterator[None]:
        assert model.module is self.inner
        self._meet("awake")
        self.is_awake = True
        plain.load_weights(self.twin, {**self.masters, **dict(self.inner.named_buffers())})
        yield
        self._hide(self.twin)
        self.is_awake = False

    @contextmanager
    def exact(self, model: nn.Module) -> Iterator[nn.Module | None]:
        self._meet("exact")
        if not self.ranks.is_first:
            yield None
            return
        held = copy.deepcopy(self.inner)
        plain.load_weights(held, self.masters)
        yield held

    def weights(self, model: nn.Module, names: Sequence[str] | None = None) -> dict[str, Tensor]:
        self._meet(f"weights {names}")
        own = trainable_parameters(self.inner)
        wanted = names if names is not None else own if self.ranks.is_first else ()
        return {name: self.masters[name].clone() for name in wanted if name in own}

    def load_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        self._meet("load_weights")
        for name, tensor in weights.items():
            if name in self.masters:
                self.masters[name].copy_(tensor)
            else:
                dict(self.inner.named_buffers())[name].copy_(tensor)

    def state(self, model: nn.Module, optimizer: Any) -> TrainedState:
        weights = self.weights(model)
        return TrainedState(weights, plain.moments(self.inner, optimizer.optim) if self.ranks.is_first else {})

    def load_state(self, model: nn.Module, optimizer: Any, state: TrainedState) -> None:
        assert state.weights, "every rank is given all of it"
        self.load_weights(model, state.weights)
        plain.load_moments(self.inner, optimizer.optim, state.moments)

    def save_optimizer(self, optimizer: Any, checkpoint: str, *arguments: Any, **named: Any) -> None:
        super().save_optimizer(optimizer.optim, checkpoint, *arguments, **named)

    def load_optimizer(self, optimizer: Any, checkpoint: str) -> Any:
        super().load_optimizer(optimizer.optim, checkpoint)
        return optimizer

    def show(self) -> None:
        for name, parameter in self.inner.named_parameters():
            parameter.data.copy_(self.masters[name])

    def keep(self) -> None:
        for name, parameter in self.inner.named_parameters():
            self.masters[name].copy_(parameter.data)
        self._hide(self.inner)

    def _hide(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data.fill_(NAN)

    def _meet(self, kind: str) -> None:
        """Compare what all ranks are about to do."""
        self.passes.append(kind)
        said = sum(kind.encode()) * 1000 + len(self.passes)
        all_said = self.ranks.gather(torch.tensor([said])).tolist()
        assert len(set(all_said)) == 1, f"rank {self.ranks.rank} is in pass {len(self.passes)}, {kind}: {all_said}"


class StrictOptimizer(CheckedOptimizer):
    """Hides what a sharded optimizer has no whole of."""

    def __init__(self, optim: PlainOptimizer, booster: StrictBooster) -> None:
        self.optim, self._booster = optim, booster
        self.scale = optim.scale
        self._groups: list[dict[str, Any]] = optim.param_groups

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._groups

    @property
    def last_step_skipped(self) -> bool:  # type: ignore[override]
        return self.optim.last_step_skipped

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)

    def backward(self, loss: Tensor) -> None:
        self.optim.backward(loss)

    def get_grad_norm(self) -> float:
        return self.optim.get_grad_norm()

    def make_ready(self, max_norm: float | None = None) -> None:
        self._booster._meet("make_ready")
        self.optim.make_ready(max_norm)

    def step(self, max_norm: float | None = None) -> None:
        self._booster._meet("step")
        self._booster.show()
        self.optim.step(max_norm)
        self._booster.keep()

    def _none(self, *_: Any) -> Any:
        raise AssertionError("the optimizer inside does this")

    _backward = _global_norm = _clip = _step = _none


def strict(**options: Any) -> StrictBooster:
    return StrictBooster(**({"ranks": ALONE} | options))

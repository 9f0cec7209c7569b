# ruff: noqa: ARG002 - arguments are the protocol's
"""A booster with the methods of ColossalAI's that `Booster` names, and none of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlhf_core.strategy.plain import PlainBooster


class ForeignOptimizer:
    """Clips and steps in its own way, and tells nothing: ColossalAI's for torch's DDP."""

    def __init__(self, optim: Any) -> None:
        self.optim = optim

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.optim.param_groups
        return groups

    @property
    def state(self) -> Any:
        return self.optim.state

    def zero_grad(self) -> None:
        self.optim.zero_grad()

    def step(self) -> None:
        self.optim.step()

    def get_grad_norm(self) -> float:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.optim.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optim.load_state_dict(state)


class Around(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.module(*arguments, **named)


class ForeignBooster:
    """Has the methods of the protocol `Booster` alone, and a plugin that cannot wait with its gradients."""

    class Plugin:
        def support_no_sync(self) -> bool:
            return False

    def __init__(self) -> None:
        self.plugin = self.Plugin()
        self._inner = PlainBooster()

    def boost(self, model: nn.Module, optimizer: Any = None, *others: Any, **named: Any) -> Any:
        model, wrapped, *rest = self._inner.boost(model, optimizer, *others, **named)
        return Around(model), ForeignOptimizer(wrapped), *rest

    def backward(self, loss: torch.Tensor, optimizer: Any) -> None:
        self._inner.backward(loss, optimizer.optim)

    def no_sync(self, model: Any = None, optimizer: Any = None) -> Any:
        raise AssertionError("the plugin does not support no_sync")

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("save_", "load_")) or name == "load_state":
            raise AttributeError(name)
        return getattr(self._inner, name)

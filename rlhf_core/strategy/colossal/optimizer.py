"""What all adapters of ColossalAI's optimizers have in common: the check before the step."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from rlhf_core.strategy.files import SETTINGS, OptimizerState
from rlhf_core.strategy.optimizer import CheckedOptimizer, GradientError

T = TypeVar("T")
Moments = dict[str, dict[str, Tensor]]
"""Tensors by moment (exp_avg, exp_avg_sq, step), then by the weight's name, as `TrainedState` has them."""


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
    """

    def __init__(self, inner: Any, *, members: Members, max_norm: float | None) -> None:
        self.inner = inner
        self.names, self._sizes = members
        self.max_norm = max_norm
        self._norm = 0.0
        self._is_ready = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer inside; a schedule sets their learning rates."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    @property
    def group_sizes(self) -> list[int]:
        """How many weights each group has as the caller built it, whatever share of them this rank holds."""
        return list(self._sizes)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 - always: zeros would be stepped with
        """Forget the gradients."""
        self._is_ready = False
        self.inner.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients to the model's, averaged over ranks."""
        self.inner.backward(loss)

    def get_grad_norm(self) -> float:
        """Return the norm before clipping of the last step's gradient, over all weights and ranks."""
        return self._norm

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

    def make_ready(self, max_norm: float | None = None) -> None:
        """Check and clip the gradients; the next step cannot fail on them any more.

        Args:
            max_norm: instead of the optimizer's own.

        Raises:
            GradientError: if the norm is not finite, on all ranks, unless a smaller loss scale is left to try.
        """
        limit = self.max_norm if max_norm is None else max_norm
        self._norm = self._global_norm()
        self.last_step_skipped = not math.isfinite(self._norm)
        if self.last_step_skipped:
            if not self._can_shrink():
                self.zero_grad()
                raise GradientError(self._norm)
        else:
            self._clip(limit)
        self._is_ready = True

    def step(self, max_norm: float | None = None) -> None:
        """Take one step, the same on every rank, from gradients that `make_ready` has seen; without that, it does now.

        Args:
            max_norm: as for `make_ready`.

        Raises:
            GradientError: as `make_ready` does; no weight was changed.
        """
        if not self._is_ready:
            self.make_ready(max_norm)
        self._is_ready = False
        self._take()

    @abstractmethod
    def moments(self) -> Moments:
        """Return the moments of all weights, whole and in host memory, on the first rank; all ranks call."""

    @abstractmethod
    def load_moments(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take the place of the present moments, every rank given the same whole ones; weights not named have none."""

    @abstractmethod
    def _global_norm(self) -> float:
        """Return the norm of the gradient over all weights and ranks, the same number on every rank."""

    @abstractmethod
    def _clip(self, limit: float | None) -> None:
        """See that the next step is from gradients scaled as torch's `clip_grads_with_norm_` scales them."""

    @abstractmethod
    def _take(self) -> None:
        """Step, or leave the step out if `last_step_skipped`."""

    def _can_shrink(self) -> bool:
        """Whether a smaller loss scale is left to try; without float16 there is none."""
        return False

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

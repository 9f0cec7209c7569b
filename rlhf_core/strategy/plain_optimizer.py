"""A torch optimizer that averages gradients over ranks, refuses what is not finite, and clips."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.strategy.optimizer import CheckedOptimizer, GradientError
from rlhf_core.strategy.ranks import Ranks

BUCKET_ELEMENTS = 1 << 26
"""Gradients that travel together, cut where they pass this: averaging takes 256 MB of memory for float32."""


class LossScale:
    """The factor that keeps float16 gradients from vanishing: halved when they overflow, doubled after a while."""

    GROWTH_INTERVAL = 2000
    SMALLEST = 1.0

    def __init__(self) -> None:
        self.factor = 65536.0
        self.good_steps = 0

    @property
    def can_shrink(self) -> bool:
        """Whether a smaller factor is left to try after an overflow."""
        return self.factor > self.SMALLEST

    def overflowed(self) -> None:
        """Take note of an overflow."""
        self.factor, self.good_steps = self.factor / 2, 0

    def stepped(self) -> None:
        """Take note of a step."""
        self.good_steps += 1
        if self.good_steps == self.GROWTH_INTERVAL:
            self.factor, self.good_steps = self.factor * 2, 0

    def facts(self) -> dict[str, float | int]:
        """Return what a continuation needs, as JSON holds it."""
        return {"factor": self.factor, "good_steps": self.good_steps}

    def load(self, facts: Mapping[str, Any]) -> None:
        """Go on from what `facts` returned."""
        self.factor, self.good_steps = float(facts["factor"]), int(facts["good_steps"])


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
        self.optim = optim
        self.max_norm = max_norm
        self.ranks = ranks
        self.scale: LossScale | None = LossScale() if scaled else None
        self._norm = 0.0
        self._is_ready = False
        """Whether the gradients are those of all ranks already, checked and clipped."""

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
        self._is_ready = False
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

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients to the model's."""
        torch.autograd.backward(loss if self.scale is None else loss * self.scale.factor)

    def get_grad_norm(self) -> float:
        """Return the norm before clipping of the last step's gradient, over all ranks."""
        return self._norm

    def make_ready(self, max_norm: float | None = None) -> None:
        """Average the gradients over ranks, check and clip them; the next step cannot fail on them any more.

        Changes nothing but the gradients, so that several models can be checked before any of them steps.

        Args:
            max_norm: instead of the optimizer's own.

        Raises:
            GradientError: if the norm is not finite, on all ranks, unless a smaller loss scale is left to try.
        """
        parameters = self.parameters()
        _average(parameters, self.ranks)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.scale is not None:
            for gradient in gradients:
                gradient.div_(self.scale.factor)
        norm = nn.utils.get_total_norm(gradients)
        self._norm = norm.item()  # the one wait for the device
        self.last_step_skipped = not math.isfinite(self._norm)
        limit = self.max_norm if max_norm is None else max_norm
        if self.last_step_skipped:
            if self.scale is None or not self.scale.can_shrink:
                self.zero_grad()
                raise GradientError(self._norm)
        elif limit is not None:
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        self._is_ready = True

    def step(self, max_norm: float | None = None) -> None:
        """Take one step, the same on every rank, from gradients that `make_ready` has seen; without that, it does now.

        In float16 a gradient that overflowed is forgotten, the loss scale halved, and no step is taken.

        Args:
            max_norm: as for `make_ready`.

        Raises:
            GradientError: as `make_ready` does; no weight was changed.
        """
        if not self._is_ready:
            self.make_ready(max_norm)
        self._is_ready = False
        if self.last_step_skipped:
            self.zero_grad()
            if self.scale is not None:
                self.scale.overflowed()
            return
        self.optim.step()
        if self.scale is not None:
            self.scale.stepped()


def _average(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Replace every gradient by its mean over ranks; a rank without one counts as zero."""
    if ranks.world_size == 1:
        return
    members = list(parameters)
    # A weight that no rank used keeps no gradient, as on one rank: with one, weight decay would move it.
    used = ranks.max(torch.tensor([int(member.grad is not None) for member in members])).tolist()
    gradients = [_flat_gradient(member) for member, is_used in zip(members, used, strict=True) if is_used]
    for bucket in _buckets(gradients):
        flat = torch.cat(bucket)
        ranks.add_up(flat)
        flat.div_(ranks.world_size)
        for piece, mean in zip(bucket, torch.split(flat, [piece.numel() for piece in bucket]), strict=True):
            piece.copy_(mean)


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

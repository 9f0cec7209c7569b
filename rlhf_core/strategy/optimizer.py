"""One step of all ranks: gradients are averaged, checked and clipped before it is taken; and float16's loss scale."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlhf_core.errors import TrainingError
from rlhf_core.strategy.ranks import Ranks


class GradientError(TrainingError):
    """A gradient's norm is not finite; the weights are untouched and the gradients forgotten."""

    def __init__(self, norm: float) -> None:
        super().__init__(
            f"the gradient's norm is {norm}, which no step can be taken from; lower the learning rate, or look for "
            "overflow in the data or the dtype"
        )
        self.norm = norm


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


class CheckedOptimizer(ABC):
    """Owns the gradients of all ranks: averages, checks and clips them, and only then steps.

    Every method that communicates is called by all ranks.

    Args:
        max_norm: gradients are clipped to this norm over all weights and ranks; None never clips.
        ranks: who trains together.
        scaled: whether losses are scaled for float16.
    """

    last_step_skipped: bool = False
    """Whether the last step overflowed in float16 and was not taken."""

    def __init__(self, *, max_norm: float | None, ranks: Ranks, scaled: bool = False) -> None:
        self.max_norm = max_norm
        self.ranks = ranks
        self.scale: LossScale | None = LossScale() if scaled else None
        self._norm = 0.0
        self._is_ready = False
        """Whether the gradients are those of all ranks already, checked and clipped."""

    @property
    @abstractmethod
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups whose learning rates a schedule sets; their members may be this rank's shards."""

    @property
    def group_sizes(self) -> list[int]:
        """How many weights each group has as the caller built it, whatever part of them this rank holds."""
        return [len(group["params"]) for group in self.param_groups]

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self._is_ready = False

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients to the model's."""
        self._backward(loss if self.scale is None else loss * self.scale.factor)

    def get_grad_norm(self) -> float:
        """Return the norm before clipping of the last step's gradient, over all weights and ranks."""
        return self._norm

    def make_ready(self, max_norm: float | None = None) -> None:
        """Average the gradients over ranks, check and clip them; the next step cannot fail on them any more.

        Changes nothing but the gradients, so that several models can be checked before any of them steps.

        Args:
            max_norm: instead of the optimizer's own.

        Raises:
            GradientError: if the norm is not finite, on all ranks, unless a smaller loss scale is left to try.
        """
        self._norm = self._global_norm()
        self.last_step_skipped = not math.isfinite(self._norm)
        if not self.last_step_skipped:
            self._clip(self.max_norm if max_norm is None else max_norm)
        elif self.scale is None or not self.scale.can_shrink:
            self.zero_grad()
            raise GradientError(self._norm)
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
        self._step()
        if self.scale is not None:
            self.scale.stepped()

    @property
    def _factor(self) -> float:
        """What gradients have to be divided by."""
        return 1.0 if self.scale is None else self.scale.factor

    @abstractmethod
    def _backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss, scaled already, to the model's."""

    @abstractmethod
    def _global_norm(self) -> float:
        """Return the norm of the averaged gradient over all weights and ranks, the same number on every rank."""

    @abstractmethod
    def _clip(self, limit: float | None) -> None:
        """Make sure that the next step is from gradients scaled as torch's `clip_grads_with_norm_` scales them."""

    @abstractmethod
    def _step(self) -> None:
        """Step from gradients that are ready."""

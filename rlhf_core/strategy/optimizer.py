"""What a trainer asks of an optimizer that a booster of ours made: to be checked before it steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

from torch import Tensor

from rlhf_core.errors import TrainingError


class GradientError(TrainingError):
    """A gradient's norm is not finite; the weights are untouched and the gradients forgotten."""

    def __init__(self, norm: float) -> None:
        super().__init__(
            f"the gradient's norm is {norm}, which no step can be taken from; lower the learning rate, or look for "
            "overflow in the data or the dtype"
        )
        self.norm = norm


class Scale(Protocol):
    """What scales losses for float16."""

    def facts(self) -> dict[str, float | int]:
        """Return what a continuation needs, as JSON holds it."""

    def load(self, facts: Any) -> None:
        """Go on from what `facts` returned."""


class CheckedOptimizer(ABC):
    """Owns the gradients of all ranks: averages, checks and clips them, and only then steps.

    Every method that communicates is called by all ranks.
    """

    scale: Scale | None = None
    """What scales losses for float16; None where nothing does."""
    last_step_skipped: bool = False
    """Whether the last step overflowed in float16 and was not taken."""

    @property
    @abstractmethod
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups whose learning rates a schedule sets; their members may be this rank's shards."""

    @property
    def group_sizes(self) -> list[int]:
        """How many weights each group has as the caller built it, whatever share of them this rank holds."""
        return [len(group["params"]) for group in self.param_groups]

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients to the model's."""

    @abstractmethod
    def get_grad_norm(self) -> float:
        """Return the norm before clipping of the last step's gradient, over all weights and ranks."""

    @abstractmethod
    def make_ready(self, max_norm: float | None = None) -> None:
        """Average the gradients over ranks, check and clip them; the next step cannot fail on them any more.

        Changes nothing but the gradients, so that several models can be checked before any of them steps.

        Args:
            max_norm: instead of the optimizer's own.

        Raises:
            GradientError: if the norm is not finite, on all ranks, unless a smaller loss scale is left to try.
        """

    @abstractmethod
    def step(self, max_norm: float | None = None) -> None:
        """Take one step, the same on every rank, from gradients that `make_ready` has seen; without that, it does now.

        In float16 a gradient that overflowed is forgotten, the loss scale halved, and no step is taken.

        Args:
            max_norm: as for `make_ready`.

        Raises:
            GradientError: as `make_ready` does; no weight was changed.
        """

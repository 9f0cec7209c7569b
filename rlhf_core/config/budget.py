"""What one night may spend."""

from __future__ import annotations

import math
from typing import NamedTuple, Self

from pydantic import Field, model_validator

from rlhf_core.config.base import Config

HOUR_S = 3600.0


class Limit(NamedTuple):
    """The first limit of a budget that a night meets."""

    seconds: float
    """Of work; infinite where there is no limit."""
    told: str
    """The limit in words."""


class BudgetConfig(Config):
    """What one night may spend, its restarts included; PPO ends at a commit before an episode that would not fit.

    Time counts while a process of the run works, whatever it does: every stage, sampling, evaluation and waiting. One
    episode a night begins as long as anything is left, so that every night comes further.
    """

    max_hours: float | None = Field(None, gt=0)
    """Hours of work; None sets no limit."""
    max_gpu_hours: float | None = Field(None, gt=0)
    """Hours of work times the GPUs of the run's machine, or of the cluster of your own; None sets no limit."""
    max_cost: float | None = Field(None, gt=0)
    """In the currency of the two prices, of which one must be set; None sets no limit."""
    cost_per_hour: float = Field(0.0, ge=0)
    """Price of an hour of work, without the GPUs."""
    cost_per_gpu_hour: float = Field(0.0, ge=0)
    """Price of one GPU for an hour."""

    @model_validator(mode="after")
    def _cost_has_a_price(self) -> Self:
        if self.max_cost is not None and not self.cost_per_hour and not self.cost_per_gpu_hour:
            raise ValueError(
                f"budget.max_cost is {self.max_cost:g}, but nothing has a price; set budget.cost_per_hour or "
                "budget.cost_per_gpu_hour"
            )
        return self

    @property
    def is_set(self) -> bool:
        """Whether anything is limited or has a price."""
        return self != BudgetConfig()

    @property
    def counts_gpus(self) -> bool:
        """Whether the number of GPUs matters."""
        return self.max_gpu_hours is not None or self.cost_per_gpu_hour > 0

    def cost(self, seconds: float, gpus: int) -> float:
        """Return the price of so many seconds of work with so many GPUs.

        >>> BudgetConfig(cost_per_hour=1, cost_per_gpu_hour=2).cost(1800, gpus=4)
        4.5
        """
        return seconds / HOUR_S * (self.cost_per_hour + gpus * self.cost_per_gpu_hour)

    def limit(self, gpus: int) -> Limit:
        """Return how long a night may work with so many GPUs, and the limit that says so.

        >>> BudgetConfig(max_hours=2, max_gpu_hours=4).limit(gpus=8)
        Limit(seconds=1800.0, told='4 GPU hours (budget.max_gpu_hours)')
        """
        hour = self.cost(HOUR_S, gpus)
        limits = [Limit(math.inf, "no limit")]
        if self.max_hours is not None:
            limits.append(Limit(self.max_hours * HOUR_S, f"{self.max_hours:g} hours (budget.max_hours)"))
        if self.max_gpu_hours is not None and gpus:
            told = f"{self.max_gpu_hours:g} GPU hours (budget.max_gpu_hours)"
            limits.append(Limit(self.max_gpu_hours * HOUR_S / gpus, told))
        if self.max_cost is not None and hour:
            limits.append(Limit(self.max_cost / hour * HOUR_S, f"a cost of {self.max_cost:g} (budget.max_cost)"))
        return min(limits)

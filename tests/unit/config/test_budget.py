"""What a budget says of how long a night may work."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from rlhf_core.config import BudgetConfig


@pytest.mark.parametrize(
    ("facts", "gpus", "seconds"),
    [
        ({"max_hours": 0.5}, 0, 1800),
        ({"max_gpu_hours": 6}, 4, 1.5 * 3600),  # 6 GPU hours are an hour and a half of 4 GPUs
        ({"max_gpu_hours": 6}, 0, math.inf),  # nothing has a GPU
        ({"max_cost": 30, "cost_per_hour": 4, "cost_per_gpu_hour": 2}, 8, 1.5 * 3600),  # 4 + 8 * 2 = 20 an hour
        ({"max_cost": 30, "cost_per_gpu_hour": 2}, 0, math.inf),
        ({"max_hours": 2, "max_gpu_hours": 3, "max_cost": 9, "cost_per_hour": 9}, 2, 3600),  # 2 h, 1.5 h and 1 h
        ({}, 8, math.inf),
    ],
)
def test_the_first_limit_that_is_met_ends_the_night(facts: dict[str, float], gpus: int, seconds: float) -> None:
    assert BudgetConfig.model_validate(facts).limit(gpus).seconds == seconds


def test_a_cost_needs_a_price() -> None:
    with pytest.raises(ValidationError, match=r"budget.max_cost is 5, but nothing has a price; set budget.cost_per"):
        BudgetConfig(max_cost=5)

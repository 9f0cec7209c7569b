"""Learning-rate schedules: the factor on the peak rate by optimizer step, from 0. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable

FLOOR = 0.1
"""Where the cosine ends."""


def warmup_then_constant(warmup_steps: int) -> Callable[[int], float]:
    """Return the schedule that rises linearly and stays.

        factor(i) = min(1, (i + 1) / (warmup_steps + 1))

    The first step already has a rate above zero; the first step after the warm-up has the full one.
    """
    return lambda step: min(1.0, (step + 1) / (warmup_steps + 1))


def warmup_then_decay(warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """Return the schedule that rises linearly, then falls linearly to zero after the last step.

        factor(i) = min((i + 1) / (warmup_steps + 1), (total_steps - i) / (total_steps - warmup_steps))

    Both are 1 at i = warmup_steps. A warm-up longer than the run is cut to the run.
    """
    warmup = min(warmup_steps, total_steps - 1)
    return lambda step: max(0.0, min((step + 1) / (warmup + 1), (total_steps - step) / (total_steps - warmup)))


def warmup_then_cosine(warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """Return the schedule that rises linearly, then falls along a cosine to a tenth.

        factor(i) = (i + 1) / (warmup + 1)                                          while i < warmup
        factor(i) = 0.1 + 0.9 * (1 + cos(pi * (i - warmup) / (total - warmup))) / 2   afterwards

    It is 1 at i = warmup, and stays at the tenth after `total_steps`. A warm-up longer than the run is cut to the run.
    """
    warmup = min(warmup_steps, total_steps - 1)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / (total_steps - warmup))
        return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2

    return factor

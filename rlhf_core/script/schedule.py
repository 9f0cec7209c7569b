"""How many optimizer steps a run takes, and the learning rate at each of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlhf_core.buffer.order import episode_windows

if TYPE_CHECKING:
    from argparse import Namespace

FLOOR = 0.1
WARMUP_SHARE = 0.025


def optimizer_steps(args: Namespace) -> int:
    """Return the optimizer steps of the whole run, which are the same on every rank."""
    windows = episode_windows(
        seed=0,
        episode=0,
        passes=args.num_update_steps,
        samples=args.num_collect_steps * args.experience_batch_size,
        batch_size=args.train_batch_size,
        accumulation_steps=args.accumulation_steps,
        sampled=False,
    )
    return int(args.num_episodes) * len(windows)


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


def schedule_of(args: Namespace) -> Callable[[int], float]:
    """Return the schedule of a run: warm-up of 2.5 % of its steps unless the flags say otherwise, then the cosine."""
    total = optimizer_steps(args)
    warmup = math.ceil(WARMUP_SHARE * total) if args.warmup_steps is None else args.warmup_steps
    return warmup_then_cosine(warmup, total)

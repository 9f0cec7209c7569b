"""How many optimizer steps a run takes, and the learning rate at each of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlhf_core.buffer.order import episode_windows
from rlhf_core.trainer.schedules import warmup_then_cosine

if TYPE_CHECKING:
    from argparse import Namespace

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


def schedule_of(args: Namespace) -> Callable[[int], float]:
    """Return the schedule of a run: warm-up of 2.5 % of its steps unless the flags say otherwise, then the cosine."""
    total = optimizer_steps(args)
    warmup = math.ceil(WARMUP_SHARE * total) if args.warmup_steps is None else args.warmup_steps
    return warmup_then_cosine(warmup, total)

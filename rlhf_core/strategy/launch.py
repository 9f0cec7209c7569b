"""Which of torchrun's processes this is; reads its environment, and imports no torch."""

from __future__ import annotations

import os


def launched_rank() -> int:
    """Return this process's rank under torchrun; 0 without it."""
    return int(os.environ.get("RANK", "0"))


def launched_ranks() -> int:
    """Return the number of processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1

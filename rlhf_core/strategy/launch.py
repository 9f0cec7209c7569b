"""Which of torchrun's processes this is; reads its environment, and imports no torch."""

from __future__ import annotations

import os


def launched_rank() -> int:
    """Return this process's rank under torchrun; 0 without it."""
    return int(os.environ.get("RANK", "0"))

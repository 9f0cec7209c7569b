"""Directories that all ranks of a case write in, and that are gone with it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_core.strategy.ranks import Ranks


@contextmanager
def directory_of_all(ranks: Ranks) -> Iterator[Path]:
    """Run the block with an empty directory, the same on every rank; the first removes it when all have done theirs."""
    path = Path(ranks.broadcast_object(tempfile.mkdtemp() if ranks.is_first else ""))
    try:
        yield path
        ranks.barrier()
    finally:
        if ranks.is_first:
            shutil.rmtree(path, ignore_errors=True)

"""Directories that all ranks of a case write in, and that are gone with it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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


@contextmanager
def compiled_in_a_directory(ranks: Ranks) -> Iterator[None]:
    """Run the block with such a directory for what PyTorch compiles."""
    with directory_of_all(ranks) as path, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(path))
        yield

"""What a process freed is the system's again, also where small things that live on lie between large ones."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from rlhf_core.freed_memory import give_back
from tests.forked import exit_of

pytestmark = pytest.mark.integration  # starts a process that has torch

LAYERS, BLOCK = 24, 22 << 20
MOST_KEPT = 3 * BLOCK


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def passes(kept: list[torch.Tensor]) -> None:
    """Three passes over layers that each need three blocks, and leave a little behind each block."""
    for _ in range(3 * LAYERS):
        blocks = []
        for _ in range(3):
            blocks.append(torch.ones(BLOCK, dtype=torch.uint8))
            kept.append(torch.ones(2500))
        blocks.clear()


def grown_in_a_thread() -> None:
    give_back()
    before, kept = resident(), list[torch.Tensor]()
    thread = threading.Thread(target=passes, args=(kept,))
    thread.start()
    thread.join()
    assert resident() - before < MOST_KEPT


def test_large_blocks_that_a_thread_freed_are_the_systems_again() -> None:
    assert exit_of(grown_in_a_thread) == 0

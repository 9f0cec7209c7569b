"""Cases that go well, and cases that do not: what is made of them is in test_ranks.py."""

from __future__ import annotations

import os
import sys
import time

import torch

from rlhf_core.errors import TrainingError
from rlhf_core.strategy.ranks import Ranks
from tests.parallel.ranks import Found


def process(ranks: Ranks, *words: str) -> Found:
    total = ranks.sum(torch.tensor([1.0]))
    sys.stdout.write("what a library prints\n")
    return Found({"pid": float(os.getpid()), "words": float(len(words))}, {"total": total})


def refused(ranks: Ranks) -> Found:
    raise TrainingError(f"rank {ranks.rank} is refused")


def wrong_on_the_last(ranks: Ranks) -> Found:
    if ranks.rank == ranks.world_size - 1:
        raise KeyError("what is missing")
    ranks.barrier()
    return Found()


def dead_on_the_last(ranks: Ranks) -> Found:
    if ranks.rank == ranks.world_size - 1:
        sys.stderr.write("last words\n")
        sys.stderr.flush()
        os._exit(3)
    return Found({"lives": 1.0})


def silent_on_the_last(ranks: Ranks) -> Found:
    if ranks.rank == ranks.world_size - 1:
        time.sleep(60)
    return Found()

"""Work that may fail on one rank, without leaving the others to wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rlhf_core.errors import TrainingError
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.strategy.roll_call import is_lost_touch

T = TypeVar("T")


def together(ranks: Ranks, work: Callable[[], T], *, what: str) -> T:
    """Do a part of the work on every rank, and fail on all if it failed on one.

    Args:
        ranks: who works together.
        work: may raise. What communicates in it must fail on all ranks where it fails on one.
        what: the part, for the message on ranks that did not fail themselves: "read its prompts".

    Raises:
        TrainingError: if another rank failed; where this one failed, its own error is raised.
    """
    try:
        done = work()
    except Exception as error:
        if not is_lost_touch(error):  # another collective would end in the midst of that one
            ranks.any(True)
        raise
    if ranks.any(False):
        raise TrainingError(f"another rank could not {what}; its own message says why")
    return done

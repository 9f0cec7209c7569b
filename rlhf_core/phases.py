"""Named points of an episode, at which the chaos tests end processes; in production nothing happens there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Phase = Literal[
    "lease",  # first trainer rank: a chunk is about to go to a maker
    "generate",  # maker: a chunk is about to be sampled
    "score",  # maker: its responses are about to be scored
    "send",  # maker: it is about to be sent
    "buffer",  # first trainer rank: it has come, and is not yet in the lease queue
    "learn",  # each trainer rank: an optimizer step is about to be taken
    "between_steps",  # each trainer rank: the actor's step is taken, the critic's is not
    "publish",  # first trainer rank: a bucket of weights is about to be laid out
    "swap",  # maker: new weights have come whole, and replace the old ones
    "snapshot",  # each trainer rank: the state is about to be taken
    "upload",  # first trainer rank: a blob of the state is about to be stored
    "manifest",  # first trainer rank: all blobs are stored, the manifest is not
]
Watcher = Callable[[Phase], None]

_WATCHERS: list[Watcher] = []


def reached(phase: Phase) -> None:
    """Tell whoever watches this process that it has come to a phase."""
    for watcher in _WATCHERS:
        watcher(phase)


def watch(watcher: Watcher) -> None:
    """Have something called at every phase of this process, until the process ends."""
    _WATCHERS.append(watcher)

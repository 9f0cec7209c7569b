"""Deals an episode's chunks to the makers and gathers what they made, in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from rlhf_core.detached.chunks import Chunk
from rlhf_core.types import EpisodeControls


class MakersLostError(RuntimeError):
    """No maker is left, or none answered within the deadline; a new group of actors may mend it."""


def deal(
    chunks: Sequence[Chunk],
    makers: dict[str, Any],
    *,
    version: int,
    controls: EpisodeControls,
    timeout_s: float,
    on_chunk: Callable[[int, int], None],
) -> list[Any]:
    """Return what the makers made of `chunks`, in the order of the chunks.

    Each maker holds one chunk at a time, so nothing piles up in the object store. A chunk whose maker
    died is made again by another, to the same numbers, since a chunk's content depends on no maker.

    Args:
        chunks: what is to be made.
        makers: actor handles by name; a dead one is removed from this mapping.
        version: policy version that every maker must hold.
        controls: the episode's KL coefficient and scale of scores; travel with each chunk.
        timeout_s: longest wait for all chunks together.
        on_chunk: called with the number of finished chunks and of all chunks.

    Raises:
        MakersLostError: every maker died, or the deadline passed; the message names them.
    """
    deadline = time.monotonic() + timeout_s
    waiting, made = deque(chunks), dict[int, Any]()
    busy: dict[Any, tuple[str, Chunk]] = {}
    while len(made) < len(chunks):
        for name in makers.keys() - {holder for holder, _ in busy.values()}:
            if waiting:
                chunk = waiting.popleft()
                busy[makers[name].make_chunk.remote(chunk, version, controls)] = (name, chunk)
        if not busy:
            raise MakersLostError("every experience maker of the run has died; the run starts new ones and goes on")
        done, _ = ray.wait(list(busy), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            names = ", ".join(sorted(name for name, _ in busy.values()))
            raise MakersLostError(f"waited {timeout_s:.0f} s for chunks from {names}, and none came")
        name, chunk = busy.pop(done[0])
        try:
            made[chunk.index] = ray.get(done[0])
        except RayActorError:
            makers.pop(name, None)
            waiting.appendleft(chunk)
        else:
            on_chunk(len(made), len(chunks))
    return [made[chunk.index] for chunk in chunks]

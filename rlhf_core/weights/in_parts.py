"""Weights of a model that several processes of a machine hold in parts: each writes its own to where makers find them.

Nobody has the whole of it; the buckets, with their checksums, are those that one process would have written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from rlhf_core.phases import reached
from rlhf_core.strategy.booster import Piece
from rlhf_core.strategy.liveness import is_connection_error
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.weights.buckets import Bucket, Plan, Publication, checksum, dtype_of, view
from rlhf_core.weights.shared_memory import SharedFile, SharedMemoryPlace, opened_for_writing


def lay_out_pieces(
    pieces: Sequence[Piece],
    file: SharedFile,
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
    version: int,
    fully: bool,
    incarnation: str,
) -> Publication | None:
    """Have all processes write their pieces to a file of this one, the first; the others call `write_pieces`.

    Args:
        pieces: in the same order on every process.
        file: that has begun.
        ranks: all processes.
        dtype: as for `lay_out`, as are those that follow.
        bucket_bytes: the same on every process.
        version: of the publication.
        fully: whether these are all weights.
        incarnation: of the publisher.

    Returns:
        None if a process cannot reach the file: the weights are to be gathered.
    """
    plan = _plan(pieces, dtype, bucket_bytes)
    rooms = []
    for size in plan.filled:
        reached("publish")
        rooms.append(file.open(max(size, 1))[:size])
        file.close(size)
    for slot, following in zip(plan.slots, plan.slots[1:], strict=False):
        if slot.bucket == following.bucket:  # the checksum covers the gap too
            rooms[slot.bucket][slot.offset + slot.size : following.offset] = 0
    ranks.broadcast_object(asdict(file.where()))
    _write(pieces, plan, rooms)
    if ranks.any(False):
        return None
    buckets = tuple(map(Bucket, plan.filled, map(checksum, rooms)))
    return Publication(version, fully, incarnation, tuple(plan.slots), buckets, file.place())


def write_pieces(pieces: Sequence[Piece], ranks: Ranks, *, dtype: torch.dtype, bucket_bytes: int) -> bool:
    """Write this process's pieces to the first one's file; return whether all could. All but the first call it.

    Args:
        pieces: in the same order on every process.
        ranks: all processes; only those that hold the same model as the first one write.
        dtype: as for `lay_out_pieces`.
        bucket_bytes: as there.
    """
    place = ranks.broadcast_object(None)
    if place is None:
        return False
    plan = _plan(pieces, dtype, bucket_bytes)
    try:
        if ranks.rank == 0:
            _write(pieces, plan, opened_for_writing(SharedMemoryPlace(**place), plan.filled))
    except OSError:  # of another machine
        return not ranks.any(True)
    except Exception as error:
        if not is_connection_error(error):
            ranks.any(True)
        raise
    return not ranks.any(False)


def _plan(pieces: Sequence[Piece], dtype: torch.dtype, bucket_bytes: int) -> Plan:
    plan = Plan(bucket_bytes)
    for piece in pieces:
        plan.add(piece.name, piece.shape, dtype_of(piece.name, piece.dtype, dtype))
    return plan


def _write(pieces: Sequence[Piece], plan: Plan, rooms: Sequence[Tensor]) -> None:
    for piece, slot in zip(pieces, plan.slots, strict=True):
        piece.write(view(rooms, slot))

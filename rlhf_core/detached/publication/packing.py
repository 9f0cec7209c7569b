"""Tensors into buckets and out of them: cast and summed up while they are copied, so that memory is read once."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor

from rlhf_core.detached.publication.manifest import (
    Bucket,
    Publication,
    TensorSlot,
    WeightsError,
    travelling_dtype,
)
from rlhf_core.detached.publication.sums import checksum
from rlhf_core.phases import reached

ALIGNMENT = 64
"""Tensors begin at a multiple of this, as those do that PyTorch allocates."""
PIECE_BYTES = 256 << 10
"""What is copied, and summed up while it is still in the processor's cache."""


class Shelf(Protocol):
    """Takes the buckets of one publication, one after the other."""

    def open(self, size: int) -> Tensor:
        """Return room for a bucket of at most so many bytes, in host memory or on a GPU."""

    def close(self, filled: int) -> None:
        """Keep the first `filled` bytes of the bucket that was opened last."""


class Packed(NamedTuple):
    """What was laid on a shelf."""

    slots: tuple[TensorSlot, ...]
    buckets: tuple[Bucket, ...]


def pack(tensors: Iterable[tuple[str, Tensor]], shelf: Shelf, *, dtype: torch.dtype, bucket_bytes: int) -> Packed:
    """Lay `tensors` into buckets on a shelf, in their order.

    Args:
        tensors: names and weights, of any dtype, on any device.
        shelf: where the buckets go.
        dtype: what floating-point weights are cast to, but for the critic's head.
        bucket_bytes: a bucket is closed when the next tensor would pass this; a larger tensor gets its own.
    """
    slots: list[TensorSlot] = []
    buckets: list[Bucket] = []
    writer: _Writer | None = None
    for name, tensor in tensors:
        target = travelling_dtype(name, tensor, dtype)
        size = tensor.numel() * target.itemsize
        if writer is not None and writer.filled and _aligned(writer.filled) + size > bucket_bytes:
            buckets.append(writer.close(shelf))
            writer = None
        if writer is None:
            reached("publish")
            writer = _Writer(shelf.open(max(size, bucket_bytes)))
        offset = writer.write(tensor, target)
        shape, name_of_dtype = tuple(tensor.shape), str(target).removeprefix("torch.")
        slots.append(TensorSlot(name, shape, name_of_dtype, len(buckets), offset, size))
    if writer is not None:
        buckets.append(writer.close(shelf))
    return Packed(tuple(slots), tuple(buckets))


def check_sums(publication: Publication, held: Sequence[Tensor]) -> None:
    """See that every bucket has arrived, and as it was sent.

    Raises:
        WeightsError: if one is missing or its checksum differs.
    """
    version = publication.version
    if len(held) != len(publication.buckets):
        raise WeightsError(
            f"weights of version {version} have {len(publication.buckets)} buckets, but {len(held)} came; "
            "publish them again"
        )
    for index, (body, bucket) in enumerate(zip(held, publication.buckets, strict=True)):
        if body.numel() != bucket.size or checksum(body) != bucket.checksum:
            raise WeightsError(f"bucket {index} of weights version {version} arrived damaged; publish them again")


def view(held: Sequence[Tensor], slot: TensorSlot) -> Tensor:
    """Return a tensor as a view of its bucket."""
    body = held[slot.bucket][slot.offset : slot.offset + slot.size]
    return body.view(getattr(torch, slot.dtype)).reshape(slot.shape)


def only_read(body: memoryview) -> Tensor:
    """Return memory that cannot be written as a vector of bytes, which is only ever copied from."""
    if not body.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(body, dtype=torch.uint8)


class _Writer:
    """Fills one bucket."""

    def __init__(self, room: Tensor) -> None:
        self.filled = 0
        self._room = room
        self._sum = xxhash.xxh3_64() if room.device.type == "cpu" else None

    def write(self, tensor: Tensor, dtype: torch.dtype) -> int:
        """Append a tensor in `dtype`; return its first byte."""
        start = _aligned(self.filled)
        if start > self.filled:  # the room may have been used before, and padding is summed up as well
            self._room[self.filled : start] = 0
            self._count(self.filled, start)
        self.filled = start + tensor.numel() * dtype.itemsize
        target = self._room[start : self.filled].view(dtype)
        source = tensor.detach().reshape(-1)
        if source.device != target.device:
            source = source.to(dtype).to(target.device)
        step = (PIECE_BYTES if target.device.type == "cpu" else max(1, self.filled - start)) // dtype.itemsize
        for first in range(0, source.numel(), step):
            target[first : first + step].copy_(source[first : first + step])
            self._count(start + first * dtype.itemsize, min(start + (first + step) * dtype.itemsize, self.filled))
        return start

    def close(self, shelf: Shelf) -> Bucket:
        shelf.close(self.filled)
        total = checksum(self._room[: self.filled]) if self._sum is None else self._sum.intdigest()
        return Bucket(self.filled, total)

    def _count(self, first: int, end: int) -> None:
        if self._sum is not None:
            self._sum.update(self._room[first:end].numpy().data)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT

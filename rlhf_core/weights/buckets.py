"""Tensors into buckets and out of them: each is cast while it is copied, and a bucket summed up beside the next."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlhf_core.phases import reached
from rlhf_core.weights.checksums import checksum
from rlhf_core.weights.publication import (
    Bucket,
    Publication,
    TensorSlot,
    WeightsError,
    travelling_dtype,
)

ALIGNMENT = 64
"""Tensors begin at a multiple of this, as those do that PyTorch allocates."""


class Shelf(Protocol):
    """Takes the buckets of one publication, one after the other."""

    def open(self, size: int) -> Tensor:
        """Return room for a bucket of at most so many bytes, in host memory or on a GPU; not in the bucket before."""

    def close(self, filled: int) -> None:
        """Keep the first `filled` bytes of the bucket that was opened last."""


class _Closed(NamedTuple):
    size: int
    checksum: Future[int]


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
    with ThreadPoolExecutor(1, "checksums") as summing:
        filling = _Filling(shelf, bucket_bytes, summing)
        for name, tensor in tensors:
            target = travelling_dtype(name, tensor, dtype)
            place = filling.take(tensor.numel() * target.itemsize)
            place.room.view(target).copy_(tensor.detach().reshape(-1))
            shape, size, name_of_dtype = tuple(tensor.shape), place.room.numel(), str(target).removeprefix("torch.")
            slots.append(TensorSlot(name, shape, name_of_dtype, place.bucket, place.offset, size))
        return Packed(tuple(slots), filling.buckets())


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


class _Place(NamedTuple):
    bucket: int
    offset: int
    room: Tensor


class _Filling:
    """Fills one bucket after the other, each of which is summed up beside the filling of the next."""

    def __init__(self, shelf: Shelf, bucket_bytes: int, summing: Executor) -> None:
        self._shelf, self._bucket_bytes, self._summing = shelf, bucket_bytes, summing
        self._closed: list[_Closed] = []
        self._open: Tensor | None = None
        self._filled = 0

    def take(self, size: int) -> _Place:
        """Return room for a tensor, in the bucket that is open if it fits there."""
        if self._open is not None and self._filled and _aligned(self._filled) + size > self._bucket_bytes:
            self._close(self._open)
        if self._open is None:
            if len(self._closed) > 1:
                self._closed[-2].checksum.result()  # from here on its room may be used again
            reached("publish")
            self._open, self._filled = self._shelf.open(max(size, self._bucket_bytes)), 0
        start = _aligned(self._filled)
        self._open[self._filled : start] = 0  # it may have been used before, and is summed up as well
        self._filled = start + size
        return _Place(len(self._closed), start, self._open[start : self._filled])

    def buckets(self) -> tuple[Bucket, ...]:
        """Close the last bucket; return all."""
        if self._open is not None:
            self._close(self._open)
        return tuple(Bucket(size, total.result()) for size, total in self._closed)

    def _close(self, room: Tensor) -> None:
        self._closed.append(_Closed(self._filled, self._summing.submit(checksum, room[: self._filled])))
        self._shelf.close(self._filled)
        self._open = None


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT

"""One version of the weights in buckets: where each tensor lies, how it gets there, and each bucket's checksum.

Tensors are cast while they are copied into a bucket. A bucket's checksum is computed while the next bucket is filled.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor

from rlhf_core.errors import RlhfError
from rlhf_core.phases import reached

ALIGNMENT = 64
"""Tensors begin at a multiple of this, as those do that PyTorch allocates."""
HEAD = "critic.head."
"""How the names of the critic's own head begin; a language model's head is `actor.lm_head`."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 over the golden ratio, as a signed number
_WORD = 8
_AT_ONCE = 8 << 20
"""Words: bounds the memory for what they are mixed into."""
_ONES = {bits: (1 << bits) - 1 for bits in (32, 35)}
"""A shift of a signed number brings in its sign; these take it out again."""


class WeightsError(RlhfError):
    """Published weights arrived damaged or too late, or do not fit the models that they are for."""

    passes = True
    ends_as = "Failed: weights not received"


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where one tensor lies: its name, form, and place in the buckets."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of a torch dtype, such as `bfloat16`."""
    bucket: int
    offset: int
    """First byte in the bucket."""
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A stretch of bytes that travels as one."""

    size: int
    """Bytes."""
    checksum: int
    """Of all of them, 64 bits."""


@dataclass(frozen=True, slots=True)
class Publication:
    """One version of the weights, as makers are told of it: small, and sent as an argument of a Ray call."""

    version: int
    fully: bool
    """False: only what is trained (adapters and heads, or trained weights)."""
    incarnation: str
    """Of the publisher; another one's numbers of versions say nothing about which is newer."""
    slots: tuple[TensorSlot, ...]
    buckets: tuple[Bucket, ...]
    place: Any
    """Where the buckets are: what the transport needs to fetch them."""
    difference: Difference | None = None
    """What is enough for a maker that holds the version before."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(slot.size for slot in self.slots)


@dataclass(frozen=True, slots=True)
class Difference:
    """What leads from one version to the next."""

    base: int
    """The version that a maker must hold, of the same publisher."""
    checksums: Mapping[str, int]
    """XXH3 of each whole tensor, once it is changed."""
    update: Publication
    """The changes."""


class Received(NamedTuple):
    """The buckets of a publication, with the maker."""

    buckets: Sequence[Tensor]
    """Vectors of bytes."""
    keep: Callable[[], None] | None = None
    """To be called once weights lie in the buckets, and none in those of a former publication: these stay as they are
    from then on. None where buckets can only be copied from."""


class BucketWriter(Protocol):
    """Takes the buckets of one publication, one after the other, to where makers find them."""

    def open(self, size: int) -> Tensor:
        """Return room for a bucket of at most so many bytes, in host memory or on a GPU; not in the bucket before."""

    def close(self, filled: int) -> None:
        """Keep the first `filled` bytes of the bucket that was opened last."""

    def place(self) -> Any:
        """Return where the buckets are, small enough for an argument of a call; nothing is written after that."""


def lay_out(
    tensors: Iterable[tuple[str, Tensor]],
    writer: BucketWriter,
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
    version: int,
    fully: bool,
    incarnation: str,
) -> Publication:
    """Copy tensors into buckets, in their order; return the publication.

    Args:
        tensors: names and weights, of any dtype, on any device.
        writer: where the buckets go.
        dtype: what floating-point weights are cast to, but for the critic's head.
        bucket_bytes: a bucket is closed when the next tensor would pass this; a larger tensor gets its own.
        version: of the publication, as are the others.
        fully: whether these are all weights.
        incarnation: of the publisher.
    """
    with ThreadPoolExecutor(1, "checksums") as executor:
        layout = _Layout(writer, bucket_bytes, executor)
        for name, tensor in tensors:
            layout.add(name, tensor, dtype_of(name, tensor.dtype, dtype))
        buckets = layout.buckets()
    return Publication(version, fully, incarnation, tuple(layout.plan.slots), buckets, writer.place())


def dtype_of(name: str, own: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a tensor of some dtype is sent in, if floating-point weights are sent in `dtype`.

    The critic's head stays in float32, as the makers' is: in bfloat16 a bias of 10.03 would become 10.
    """
    if not own.is_floating_point:
        return own
    return torch.float32 if name.startswith(HEAD) else dtype


def view(received: Sequence[Tensor], slot: TensorSlot) -> Tensor:
    """Return a tensor as a view of its bucket."""
    body = received[slot.bucket][slot.offset : slot.offset + slot.size]
    return body.view(getattr(torch, slot.dtype)).reshape(slot.shape)


def verify(publication: Publication, received: Sequence[Tensor]) -> None:
    """Check that every bucket has arrived, and as it was sent.

    Raises:
        WeightsError: if one is missing or its checksum differs.
    """
    version = publication.version
    if len(received) != len(publication.buckets):
        raise WeightsError(
            f"weights of version {version} have {len(publication.buckets)} buckets, but {len(received)} came; "
            "publish them again"
        )
    for index, (body, bucket) in enumerate(zip(received, publication.buckets, strict=True)):
        if body.numel() != bucket.size or checksum(body) != bucket.checksum:
            raise WeightsError(f"bucket {index} of weights version {version} arrived damaged; publish them again")


def checksum(body: Tensor) -> int:
    """Return the checksum of a vector of bytes, on the device where it lies."""
    return xxh3(body) if body.device.type == "cpu" else word_sum(body)


def xxh3(body: Tensor) -> int:
    """Return XXH3 of bytes in host memory; it reads faster than a copy copies, and five times as fast as CRC-32."""
    return xxhash.xxh3_64_intdigest(body.numpy().data)


def word_sum(body: Tensor) -> int:
    """Return the sum of all 64-bit words, each mixed with its place, modulo 2**64; on any device.

        x_i = w_i + (2 i + 1) C
        y_i = (x_i ^ (x_i >> 32)) C
        sum = sum_i y_i ^ (y_i >> 29)

    C is odd, so that no two words in the same place are mixed into the same number; shifts bring in zeros.
    """
    words = torch.nn.functional.pad(body, (0, -body.numel() % _WORD)).view(torch.int64)
    total = 0
    for first in range(0, words.numel(), _AT_ONCE):
        part = words[first : first + _AT_ONCE]
        mixed = torch.arange(first, first + part.numel(), device=part.device).mul_(2).add_(1).mul_(_ODD).add_(part)
        mixed ^= (mixed >> 32) & _ONES[32]
        mixed *= _ODD
        mixed ^= (mixed >> 29) & _ONES[35]
        total += int(mixed.sum())
    return total % (1 << 64)


def read_only(body: memoryview) -> Tensor:
    """Return memory that cannot be written as a vector of bytes, which is only ever copied from."""
    if not body.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(body, dtype=torch.uint8)


class Plan:
    """Where tensors come to lie, one after the other.

    Args:
        bucket_bytes: as for `lay_out`.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.slots: list[TensorSlot] = []
        self.filled: list[int] = []
        """Bytes of each bucket."""
        self._bucket_bytes = bucket_bytes

    def add(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> TensorSlot:
        """Return the place of the next tensor: in the last bucket, if it fits there, or else in another."""
        size = math.prod(shape) * dtype.itemsize
        if not self.filled or (self.filled[-1] and _aligned(self.filled[-1]) + size > self._bucket_bytes):
            self.filled.append(0)
        start = _aligned(self.filled[-1])
        self.filled[-1] = start + size
        name_of_dtype = str(dtype).removeprefix("torch.")
        self.slots.append(TensorSlot(name, tuple(shape), name_of_dtype, len(self.filled) - 1, start, size))
        return self.slots[-1]


class _Layout:
    """Fills one bucket after the other."""

    def __init__(self, writer: BucketWriter, bucket_bytes: int, executor: Executor) -> None:
        self.plan = Plan(bucket_bytes)
        self._writer, self._bucket_bytes, self._executor = writer, bucket_bytes, executor
        self._closed: list[tuple[int, Future[int]]] = []
        """Size and checksum of each bucket that is full."""
        self._open: Tensor | None = None
        self._filled = 0

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        """Copy a tensor to its place."""
        slot = self.plan.add(name, tensor.shape, dtype)
        if self._open is not None and slot.bucket > len(self._closed):
            self._close(self._open)
        if self._open is None:
            if len(self._closed) > 1:
                self._closed[-2][1].result()  # from here on its room may be used again
            reached("publish")
            self._open, self._filled = self._writer.open(max(slot.size, self._bucket_bytes)), 0
        # the room may have been used before, and the checksum covers the gap too
        self._open[self._filled : slot.offset] = 0
        self._filled = slot.offset + slot.size
        self._open[slot.offset : self._filled].view(dtype).copy_(tensor.detach().reshape(-1))

    def buckets(self) -> tuple[Bucket, ...]:
        """Close the last bucket; return all."""
        if self._open is not None:
            self._close(self._open)
        return tuple(Bucket(size, total.result()) for size, total in self._closed)

    def _close(self, room: Tensor) -> None:
        self._closed.append((self._filled, self._executor.submit(checksum, room[: self._filled])))
        self._writer.close(self._filled)
        self._open = None


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT

"""What a publication of weights is: a version, where each tensor lies, and what the bytes must sum up to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rlhf_core.errors import RlhfError

if TYPE_CHECKING:
    from rlhf_core.weights.difference import Difference

HEAD = "critic.head."
"""How the names of the critic's own head begin; a language model's head is `actor.lm_head`."""


class WeightsError(RlhfError):
    """Published weights arrived damaged or too late, or do not fit the models that they are for."""

    passes = True


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


class Arrived(NamedTuple):
    """The buckets of a publication, with the maker."""

    buckets: Sequence[Tensor]
    """Vectors of bytes."""
    keep: Callable[[], None] | None = None
    """To be called once weights lie in the buckets, and none in those of a former publication: these stay as they are
    from then on. None where buckets can only be copied from."""


def travelling_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a tensor is sent in, if floating-point weights are sent in `dtype`.

    The critic's head stays in float32, as the makers' is: in bfloat16 a bias of 10.03 would become 10.
    """
    if not tensor.is_floating_point():
        return tensor.dtype
    return torch.float32 if name.startswith(HEAD) else dtype

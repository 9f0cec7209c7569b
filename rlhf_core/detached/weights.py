"""Weights on their way from the trainer to the makers: contiguous buckets, checksums, all or nothing.

A torch tensor through Ray's object store is copied by pickle; a NumPy view is not. So tensors are
laid into byte buckets, which the makers of a node map from shared memory without a copy.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_core.errors import RlhfError
from rlhf_core.trainer.ppo.learner import PPOLearner

Bucket = NDArray[np.uint8]
HEAD = "head."
"""How the names of the critic's own weights begin; a language model's head is `lm_head`."""
T = TypeVar("T")


class WeightsError(RlhfError):
    """Published weights arrived damaged, or do not fit the model that they are for."""


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
class WeightsManifest:
    """What a publication holds; compared by every maker before a single weight is replaced."""

    version: int
    slots: tuple[TensorSlot, ...]
    checksums: tuple[int, ...]
    """CRC-32 of each bucket."""


@dataclass(frozen=True, slots=True)
class Publication:
    """One version of the weights on its way to the makers."""

    manifest: WeightsManifest
    buckets: list[Any]
    """References, inside a list so that Ray leaves fetching to whoever is given them."""

    @property
    def version(self) -> int:
        """Number of this publication."""
        return self.manifest.version


def published_weights(learner: PPOLearner, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield actor's and critic's weights as the makers hold them: adapters merged, cast once.

    The critic's head stays in float32, as the makers' is: in bfloat16 a bias of 10.03 would become 10. Every rank calls
    this and goes through it to the end; only the first is given weights.

    Args:
        learner: whose weights.
        dtype: the makers' `rollout_dtype`.
    """
    roles: tuple[Literal["actor", "critic"], ...] = ("actor", "critic")
    for role in roles:
        for name, tensor in learner.merged_weights(role, dtype=dtype, keeping=(HEAD,)).items():
            yield f"{role}.{name}", tensor


def pack(
    tensors: Iterable[tuple[str, Tensor]],
    *,
    version: int,
    put: Callable[[Bucket], T],
    bucket_bytes: int = 64 << 20,
) -> tuple[WeightsManifest, list[T]]:
    """Lay `tensors` into buckets, each in its own dtype; return the manifest and what `put` made of each bucket.

    One bucket is in memory at a time.

    Args:
        tensors: names and weights; order is kept.
        version: number of this publication, rising by one.
        put: takes a bucket away, such as `ray.put`.
        bucket_bytes: a bucket is closed when the next tensor would pass this; a larger tensor gets its own.
    """
    slots: list[TensorSlot] = []
    kept: list[T] = []
    checksums: list[int] = []
    pending: list[Bucket] = []
    filled = 0

    def close() -> None:
        bucket = np.concatenate(pending)
        checksums.append(zlib.crc32(bucket.data))
        kept.append(put(bucket))
        pending.clear()

    for name, tensor in tensors:
        body = _bytes_of(tensor.detach().to("cpu").contiguous())
        if pending and filled + body.size > bucket_bytes:
            close()
            filled = 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        slots.append(TensorSlot(name, tuple(tensor.shape), dtype, len(kept), filled, body.size))
        pending.append(body)
        filled += body.size
    if pending:
        close()
    return WeightsManifest(version, tuple(slots), tuple(checksums)), kept


def unpack(manifest: WeightsManifest, buckets: Iterable[Bucket]) -> dict[str, Tensor]:
    """Return the tensors by name, as read-only views of the buckets.

    Raises:
        WeightsError: a bucket is missing or its checksum differs.
    """
    held = list(buckets)
    if len(held) != len(manifest.checksums):
        raise WeightsError(
            f"weights of version {manifest.version} have {len(manifest.checksums)} buckets, but {len(held)} "
            "came; publish them again"
        )
    for index, (bucket, checksum) in enumerate(zip(held, manifest.checksums, strict=True)):
        if zlib.crc32(bucket.data) != checksum:
            raise WeightsError(
                f"bucket {index} of weights version {manifest.version} arrived damaged; publish them again"
            )
    return {slot.name: _view(held[slot.bucket], slot) for slot in manifest.slots}


def replace_weights(models: Mapping[str, torch.nn.Module], tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` over the weights of `models`: all names and shapes are checked before the first copy.

    Args:
        models: modules by role; the tensor `actor.x` is parameter `x` of the model `actor`.
        tensors: a value for every parameter of every model.

    Raises:
        WeightsError: a name is unknown, missing, or has another shape; no weight was changed.
    """
    own = {  # named_parameters: tied weights once
        f"{role}.{name}": parameter for role, model in models.items() for name, parameter in model.named_parameters()
    }
    unknown, missing = sorted(tensors.keys() - own.keys()), sorted(own.keys() - tensors.keys())
    reshaped = sorted(name for name in tensors.keys() & own.keys() if tensors[name].shape != own[name].shape)
    if unknown or missing or reshaped:
        raise WeightsError(
            f"published weights do not fit the models: unknown {unknown[:3]}, missing {missing[:3]}, "
            f"of another shape {reshaped[:3]}; build trainer and makers from one configuration"
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    flat: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat


def _view(bucket: Bucket, slot: TensorSlot) -> Tensor:
    dtype = getattr(torch, slot.dtype)
    if not slot.size:
        return torch.empty(slot.shape, dtype=dtype)
    with warnings.catch_warnings():
        # Ray hands out read-only arrays; these tensors are only ever copied from.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(bucket.data, dtype=torch.uint8, count=slot.size, offset=slot.offset)
    return flat.view(dtype).reshape(slot.shape)

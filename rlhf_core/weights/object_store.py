"""Buckets in Ray's object store, as NumPy arrays: a tensor would be pickled, an array is mapped as it lies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, ObjectLostError
from torch import Tensor

from rlhf_core.weights.buckets import Publication, Received, WeightsError, read_only

_BUFFERS = 2
_NONE = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class ObjectStorePlace:
    """The references of the buckets: inside an object, so that Ray leaves fetching to whoever is given it."""

    references: tuple[Any, ...]


class ObjectWriter:
    """Puts one bucket after the other; none but the one that is being filled is in this process's memory."""

    def __init__(self, sender: ObjectStoreSender) -> None:
        self._sender = sender
        self._references: list[Any] = []
        self._open: Tensor

    def open(self, size: int) -> Tensor:
        """Return room for a bucket."""
        self._open = self._sender.buffer(size)
        return self._open

    def close(self, filled: int) -> None:
        """Put the first bytes of the bucket that was opened last."""
        self._references.append(ray.put(self._open[:filled].numpy()))

    def place(self) -> ObjectStorePlace:
        """Return the references."""
        return ObjectStorePlace(tuple(self._references))


class ObjectStoreSender:
    """The trainer's end: Ray frees an object when nobody has its reference."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def begin(self) -> ObjectWriter:
        """Return a writer for one publication."""
        return ObjectWriter(self)

    def buffer(self, size: int) -> Tensor:
        """Return memory that is used for every second bucket."""
        used = self._buffers.pop(0) if len(self._buffers) == _BUFFERS else _NONE
        self._buffers.append(used if used.numel() >= size else torch.empty(size, dtype=torch.uint8))
        return self._buffers[-1][:size]

    def free(self, writer: ObjectWriter) -> None:
        """Its references go with it."""

    def close(self) -> None:
        """Free the memory."""
        self._buffers = []


class ObjectStoreReceiver:
    """A maker's end: gets buckets out of the object store, from another node if need be."""

    @contextmanager
    def buckets(self, publication: Publication, timeout_s: float) -> Iterator[Received]:
        """Yield the buckets, which cannot be written.

        Raises:
            TimeoutError: if they do not come in time.
            WeightsError: if they are lost.
        """
        version = publication.version
        try:
            arrays = ray.get(list(publication.place.references), timeout=timeout_s)
        except GetTimeoutError as error:
            raise TimeoutError(
                f"waited {timeout_s:.0f} s for {len(publication.buckets)} buckets of weights version {version} from "
                "the trainer's node, and they did not come; is it alive, and the network?"
            ) from error
        except ObjectLostError as error:
            raise WeightsError(
                f"weights of version {version} are lost: the trainer that published them, or its node, has ended; take "
                "what the trainer publishes next"
            ) from error
        yield Received([read_only(array.data) for array in arrays])

    def close(self) -> None:
        """Nothing is held."""

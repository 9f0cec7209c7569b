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

from rlhf_core.weights.buckets import only_read
from rlhf_core.weights.publication import Arrived, Publication, WeightsError

_SCRATCHES = 2
_NONE = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class ObjectsPlace:
    """The references of the buckets: inside an object, so that Ray leaves fetching to whoever is given it."""

    references: tuple[Any, ...]


class ObjectsShelf:
    """Puts one bucket after the other; none but the one that is being filled is in this process's memory."""

    def __init__(self, outbox: ObjectsOutbox) -> None:
        self._outbox = outbox
        self._references: list[Any] = []
        self._open: Tensor

    def open(self, size: int) -> Tensor:
        """Return room for a bucket."""
        self._open = self._outbox.scratch(size)
        return self._open

    def close(self, filled: int) -> None:
        """Put the first bytes of the bucket that was opened last."""
        self._references.append(ray.put(self._open[:filled].numpy()))

    def place(self) -> ObjectsPlace:
        """Return the references."""
        return ObjectsPlace(tuple(self._references))


class ObjectsOutbox:
    """Ray frees an object when nobody has its reference."""

    def __init__(self) -> None:
        self._scratch: list[Tensor] = []

    def begin(self) -> ObjectsShelf:
        """Return a shelf for one publication."""
        return ObjectsShelf(self)

    def scratch(self, size: int) -> Tensor:
        """Return memory that is used for every second bucket."""
        used = self._scratch.pop(0) if len(self._scratch) == _SCRATCHES else _NONE
        self._scratch.append(used if used.numel() >= size else torch.empty(size, dtype=torch.uint8))
        return self._scratch[-1][:size]

    def free(self, shelf: ObjectsShelf) -> None:
        """Its references go with it."""

    def shut(self) -> None:
        """Let go of the memory."""
        self._scratch = []


class ObjectsInbox:
    """Gets buckets out of the object store, from another node if need be."""

    @contextmanager
    def buckets(self, publication: Publication, timeout_s: float) -> Iterator[Arrived]:
        """Yield the buckets, which cannot be written.

        Raises:
            TimeoutError: if they do not come in time.
            WeightsError: if they are lost.
        """
        version = publication.version
        try:
            held = ray.get(list(publication.place.references), timeout=timeout_s)
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
        yield Arrived([only_read(body.data) for body in held])

    def close(self) -> None:
        """Nothing is held."""

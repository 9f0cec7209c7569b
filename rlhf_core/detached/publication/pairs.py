"""Buckets from GPU to GPU: the trainer and each maker are a group of two, over which NCCL sends them.

A group of all makers would wait for each of them, and fail with any; of a pair only one is the other's business. The
publisher opens a store (torch.distributed's) on a port of its node. A maker that was told of a publication asks for it
there, and a thread of the publisher sends it. Makers join by asking, and leave by dying. Whatever waits does so in
a thread that is given up at the deadline (`pair`).
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_core.detached.publication.manifest import Publication, WeightsError
from rlhf_core.detached.publication.pair import Pair, connect, own_device, synchronise
from rlhf_core.strategy.meeting import open_meeting

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
"""A closed publisher is noticed after this."""
_STORE_S = 60.0
"""Longest wait of the publisher for an answer of its own store."""


@dataclass(frozen=True, slots=True)
class PairsPlace:
    """Where a maker asks for a publication."""

    host: str
    port: int
    number: int
    """Of the publication, as the publisher counts them."""


class PairsShelf:
    """Buckets of a publication in the memory of the publisher's device.

    Args:
        place: where makers ask for it.
        device: of the buckets.
    """

    def __init__(self, place: PairsPlace, device: torch.device) -> None:
        self.buckets: list[Tensor] = []
        self._place, self._device = place, device
        self._open: Tensor

    def open(self, size: int) -> Tensor:
        """Return room for a bucket."""
        self._open = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._open

    def close(self, filled: int) -> None:
        """Keep the first bytes of the bucket that was opened last."""
        self.buckets.append(self._open[:filled])

    def place(self) -> PairsPlace:
        """Return where to ask; whatever has been written is there for other streams of the GPU too."""
        synchronise(self._device)
        return self._place

    @property
    def number(self) -> int:
        """Of the publication."""
        return self._place.number


class _Ask(NamedTuple):
    """What a maker writes into the store."""

    ticket: int
    maker: str
    number: int
    timeout_s: float

    def written(self) -> str:
        return f"{self.maker} {self.number} {self.timeout_s}"

    @classmethod
    def read(cls, ticket: int, text: str) -> _Ask:
        maker, number, timeout_s = text.split()
        return cls(ticket, maker, int(number), float(timeout_s))


class PairsOutbox:
    """Sends publications to makers that ask for them.

    Args:
        address: of this node, as the makers reach it.
        device: of this process, where buckets are laid out.
    """

    def __init__(self, address: str, device: torch.device) -> None:
        self._address, self._device = address, device
        self._offered: dict[int, PairsShelf] = {}
        self._pairs: dict[str, Pair] = {}
        self._count = 0
        self._closing = threading.Event()
        listener = open_meeting(address)
        self._port: int = listener.getsockname()[1]
        self._store = connect(address, self._port, _STORE_S, listener.detach())
        self._server = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._server.start()

    def begin(self) -> PairsShelf:
        """Return a shelf for one publication; it is sent once it is full: nobody is told of it before."""
        self._count += 1
        shelf = PairsShelf(PairsPlace(self._address, self._port, self._count), self._device)
        self._offered[shelf.number] = shelf
        return shelf

    def free(self, shelf: PairsShelf) -> None:
        """Offer a publication no more; what is being sent is sent to the end."""
        self._offered.pop(shelf.number, None)

    def shut(self) -> None:
        """Send nothing more."""
        self._closing.set()
        self._server.join()
        for pair in self._pairs.values():
            pair.abort()
        self._offered.clear()

    def _serve(self) -> None:
        ticket = 1
        while not self._closing.is_set():
            key = f"ask/{ticket}"
            try:
                self._store.wait([key], timedelta(seconds=_LOOK_S))
            except dist.DistStoreError:
                continue
            ask = _Ask.read(ticket, self._store.get(key).decode())
            self._store.delete_key(key)
            offered = self._offered.get(ask.number)
            self._store.set(f"answer/{ticket}", "comes" if offered else "gone")
            ticket += 1
            if offered is not None:
                threading.Thread(target=self._send, args=(ask, offered), name="weights", daemon=True).start()

    def _send(self, ask: _Ask, shelf: PairsShelf) -> None:
        try:
            pair = self._pairs.get(ask.maker)
            if pair is None:
                store = connect(self._address, self._port, ask.timeout_s)
                pair = self._pairs[ask.maker] = Pair(store, ask.maker, 0, self._device)
            pair.exchange(shelf.buckets, ask.timeout_s)
        except Exception as error:  # whatever a transport fails with: the maker has its own deadline
            logger.warning("weights could not be sent to a maker (%s)", str(error).splitlines()[0])
            lost = self._pairs.pop(ask.maker, None)
            if lost is not None:
                lost.abort()


class PairsInbox:
    """A maker's end of its pair with the trainer."""

    def __init__(self) -> None:
        self._pair: Pair | None = None
        self._port = ("", 0)
        self._store: Any = None

    @contextmanager
    def buckets(self, publication: Publication, timeout_s: float) -> Iterator[list[Tensor]]:
        """Yield the buckets, in the memory of this process's device.

        Raises:
            WeightsError: if they are not offered any more, or the trainer is gone.
            TimeoutError: if they do not come in time.
        """
        place, version, device = publication.place, publication.version, own_device()
        try:
            pair = self._ask(place, timeout_s, version)
            held = [torch.empty(bucket.size, dtype=torch.uint8, device=device) for bucket in publication.buckets]
            synchronise(device)  # whatever had their memory before is done with it
            pair.exchange(held, timeout_s)
        except TimeoutError as error:
            self.close()
            raise TimeoutError(
                f"waited {timeout_s:.0f} s for weights of version {version} from the trainer at {place.host}, and they "
                "did not come; is it alive?"
            ) from error
        except (RuntimeError, OSError) as error:  # of torch.distributed and its backends
            self.close()
            raise WeightsError(
                f"weights of version {version} did not come from the trainer at {place.host} "
                f"({str(error).splitlines()[0]}); take what the trainer publishes next"
            ) from error
        try:
            yield held
        finally:
            synchronise(device)  # before they are given up

    def close(self) -> None:
        """Leave the pair."""
        if self._pair is not None:
            self._pair.abort()
        self._pair, self._store, self._port = None, None, ("", 0)

    def _ask(self, place: PairsPlace, timeout_s: float, version: int) -> Pair:
        """Return the pair over which the publication comes."""
        if self._pair is None or self._port != (place.host, place.port):
            self.close()
            self._store, self._port = connect(place.host, place.port, timeout_s), (place.host, place.port)
            self._pair = Pair(self._store, uuid.uuid4().hex, 1, own_device())
        ticket = self._store.add("asked", 1)
        ask = _Ask(ticket, self._pair.maker, place.number, timeout_s)
        self._store.set(f"ask/{ticket}", ask.written())
        key = f"answer/{ticket}"
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except dist.DistStoreError as error:
            raise TimeoutError(str(error)) from error
        answer = self._store.get(key).decode()
        self._store.delete_key(key)
        if answer != "comes":
            raise WeightsError(f"weights of version {version} are replaced by newer ones; take those")
        return self._pair

"""Buckets from GPU to GPU: the trainer and each maker are a group of two, over which NCCL sends them.

A group of all makers would wait for each of them, and fail with any; of a pair only one is the other's business. The
publisher opens a store (torch.distributed's) on a port of its node. A maker that was told of a publication asks for it
there, and a thread of the publisher sends it. Makers join by asking, and leave by dying: one that comes up again asks
under its old name, over a new pair, and the old one is left. Whatever waits does so in a thread that is given up at the
deadline (`pair`).
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import ray
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_core.strategy.rendezvous import open_rendezvous
from rlhf_core.weights.deadline import Deadline
from rlhf_core.weights.nccl_pair import Pair, connect, own_device, synchronise
from rlhf_core.weights.publication import Arrived, Publication, WeightsError

logger = logging.getLogger(__name__)

_LOOK_S = 0.02
"""From one look for new asks to the next: a wait that the store ends itself is a warning on stderr each time."""
_WRITTEN_S = 5.0
"""A maker that drew a ticket and has not written what it asks for by then is gone."""
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

    maker: str
    pair: str
    number: int
    timeout_s: float

    def written(self) -> str:
        return f"{self.maker} {self.pair} {self.number} {self.timeout_s}"

    @classmethod
    def read(cls, text: str) -> _Ask:
        maker, pair, number, timeout_s = text.split()
        return cls(maker, pair, int(number), float(timeout_s))


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
        """By maker."""
        self._guard = threading.Lock()
        """Of the pairs, which each publication is sent over in a thread of its own."""
        self._count = 0
        self._ticket, self._seen_at = 1, 0.0
        """Whose turn it is, and when it was seen to be drawn and not written; 0 if it was not."""
        self._closing = threading.Event()
        listener = open_rendezvous(address)
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
        with self._guard:
            left = list(self._pairs.values())
            self._pairs.clear()
        for pair in left:
            pair.abort()
        self._offered.clear()

    def _serve(self) -> None:
        while not self._closing.wait(_LOOK_S):
            try:
                while self._answer_next():
                    pass
            except Exception as error:  # whatever one ask or the store fails with: others are still to be served
                logger.warning("a maker that asked for weights could not be answered (%s)", _line(error))

    def _answer_next(self) -> bool:
        """Answer the maker whose turn it is; return False if there is nobody to answer yet."""
        ticket, key = self._ticket, f"ask/{self._ticket}"
        if self._store.add("asked", 0) < ticket:
            return False
        is_written = self._store.check([key])
        if not is_written:
            self._seen_at = self._seen_at or time.monotonic()
            if time.monotonic() - self._seen_at < _WRITTEN_S:
                return False
        self._ticket, self._seen_at = ticket + 1, 0.0
        ask = _Ask.read(self._store.get(key).decode()) if is_written else None
        self._store.delete_key(key)
        offered = None if ask is None else self._offered.get(ask.number)
        self._store.set(f"answer/{ticket}", "gone" if offered is None else "comes")
        if offered is not None:
            threading.Thread(target=self._send, args=(ask, offered), name="weights", daemon=True).start()
        return True

    def _send(self, ask: _Ask, shelf: PairsShelf) -> None:
        deadline = Deadline(ask.timeout_s)
        pair: Pair | None = None
        try:
            pair = self._pair_of(ask, deadline)
            pair.exchange(shelf.buckets, deadline.left_s())
        except Exception as error:  # whatever a transport fails with: the maker has its own deadline
            logger.warning("weights could not be sent to a maker (%s)", _line(error))
            if pair is not None:
                with self._guard:
                    if self._pairs.get(ask.maker) is pair:
                        del self._pairs[ask.maker]
                pair.abort()

    def _pair_of(self, ask: _Ask, deadline: Deadline) -> Pair:
        """Return the pair that a maker asks over, and leave the one that it had before."""
        with self._guard:
            former = self._pairs.get(ask.maker)
        if former is not None and former.name == ask.pair:
            return former
        pair = Pair(connect(self._address, self._port, deadline.left_s()), ask.pair, 0, self._device)
        with self._guard:
            if self._closing.is_set():
                raise WeightsError("the publisher is closed; take what the trainer publishes next")
            former = self._pairs.get(ask.maker)
            self._pairs[ask.maker] = pair
        if former is not None:
            former.abort()
        return pair


class PairsInbox:
    """A maker's end of its pair with the trainer."""

    def __init__(self) -> None:
        self._maker = _own_name()
        self._pair: Pair | None = None
        self._port = ("", 0)
        self._store: Any = None

    @contextmanager
    def buckets(self, publication: Publication, timeout_s: float) -> Iterator[Arrived]:
        """Yield the buckets, in the memory of this process's device.

        Raises:
            WeightsError: if they are not offered any more, or the trainer is gone.
            TimeoutError: if they do not come in time.
        """
        place, version, device = publication.place, publication.version, own_device()
        deadline = Deadline(timeout_s)
        try:
            pair = self._ask(place, deadline, version)
            held = [torch.empty(bucket.size, dtype=torch.uint8, device=device) for bucket in publication.buckets]
            synchronise(device)  # whatever had their memory before is done with it
            pair.exchange(held, deadline.left_s())
        except TimeoutError as error:
            self.close()
            raise TimeoutError(
                f"waited {timeout_s:.0f} s for weights of version {version} from the trainer at {place.host}, and they "
                "did not come; is it alive?"
            ) from error
        except (RuntimeError, OSError) as error:  # of torch.distributed and its backends
            self.close()
            raise WeightsError(
                f"weights of version {version} did not come from the trainer at {place.host} ({_line(error)}); take "
                "what the trainer publishes next"
            ) from error
        try:
            yield Arrived(held)
        finally:
            synchronise(device)  # before they are given up

    def close(self) -> None:
        """Leave the pair."""
        if self._pair is not None:
            self._pair.abort()
        self._pair, self._store, self._port = None, None, ("", 0)

    def _ask(self, place: PairsPlace, deadline: Deadline, version: int) -> Pair:
        """Return the pair over which the publication comes."""
        if self._pair is None or self._port != (place.host, place.port):
            self.close()
            self._store, self._port = connect(place.host, place.port, deadline.left_s()), (place.host, place.port)
            self._pair = Pair(self._store, uuid.uuid4().hex, 1, own_device())
        ticket = self._store.add("asked", 1)
        ask = _Ask(self._maker, self._pair.name, place.number, deadline.left_s())
        self._store.set(f"ask/{ticket}", ask.written())
        key = f"answer/{ticket}"
        try:
            self._store.wait([key], timedelta(seconds=deadline.left_s()))
        except dist.DistStoreError as error:
            raise TimeoutError(str(error)) from error
        answer = self._store.get(key).decode()
        self._store.delete_key(key)
        if answer != "comes":
            raise WeightsError(f"weights of version {version} are replaced by newer ones; take those")
        return self._pair


def _own_name() -> str:
    """Return what this maker is called: an actor that Ray starts again keeps its name."""
    actor = ray.get_runtime_context().get_actor_id() if ray.is_initialized() else None
    return actor or uuid.uuid4().hex


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""NCCL transport: buckets from GPU to GPU, over a connection between the trainer and each maker.

A connection is a process group of two: a group of all makers would wait for each of them, and fail with any. The
publisher opens a store (torch.distributed's) on a port of its node. A maker that was told of a publication requests it
there, and a thread of the publisher sends it. A maker that comes up again after its death requests under its old name,
over a new connection, and the old one is left. Whatever waits does so in a thread that is given up at the deadline.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import ray
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_core.ray_tools.calls import Deadline, within
from rlhf_core.strategy.rendezvous import open_rendezvous, use_interface_towards
from rlhf_core.weights.buckets import Publication, Received, WeightsError

logger = logging.getLogger(__name__)

_POLL_S = 0.02
"""From one look for new requests to the next: a wait that the store ends itself is a warning on stderr each time."""
_WRITTEN_S = 5.0
"""A maker that drew a ticket and has not written its request by then is gone."""
_STORE_S = 60.0
"""Longest wait of the publisher for an answer of its own store."""
_ABORT_S = 5.0
"""Longest wait for a group to be left."""
_GROUP_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Else PyTorch ends the whole process when a peer is lost: a trainer must not die with a maker."""
_ENVIRONMENT = threading.Lock()


@dataclass(frozen=True, slots=True)
class NcclPlace:
    """Where a maker requests a publication."""

    host: str
    port: int
    number: int
    """Of the publication, as the publisher counts them."""


class GpuBuckets:
    """Buckets of a publication in the memory of the publisher's device.

    Args:
        place: where makers request it.
        device: of the buckets.
    """

    def __init__(self, place: NcclPlace, device: torch.device) -> None:
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

    def place(self) -> NcclPlace:
        """Return where to request them; whatever has been written is there for other streams of the GPU too."""
        _synchronise(self._device)
        return self._place

    @property
    def number(self) -> int:
        """Of the publication."""
        return self._place.number


class _Request(NamedTuple):
    """What a maker writes into the store."""

    maker: str
    connection: str
    number: int
    timeout_s: float

    def written(self) -> str:
        return f"{self.maker} {self.connection} {self.number} {self.timeout_s}"

    @classmethod
    def read(cls, text: str) -> _Request:
        maker, connection, number, timeout_s = text.split()
        return cls(maker, connection, int(number), float(timeout_s))


class NcclSender:
    """The trainer's end: sends publications to makers that request them.

    Args:
        address: of this node, as the makers reach it.
        device: of this process, where buckets are laid out.
    """

    def __init__(self, address: str, device: torch.device) -> None:
        self._address, self._device = address, device
        self._offered: dict[int, GpuBuckets] = {}
        self._connections: dict[str, Connection] = {}
        """By maker."""
        self._guard = threading.Lock()
        """Of the connections, which each publication is sent over in a thread of its own."""
        self._count = 0
        self._ticket, self._seen_at = 1, 0.0
        """Whose turn it is, and when it was seen to be drawn and not written; 0 if it was not."""
        self._closing = threading.Event()
        listener = open_rendezvous(address)
        self._port: int = listener.getsockname()[1]
        self._store = connect(address, self._port, _STORE_S, listener.detach())
        self._server = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._server.start()

    def begin(self) -> GpuBuckets:
        """Return a writer for one publication; it is sent once it is full: nobody is told of it before."""
        self._count += 1
        writer = GpuBuckets(NcclPlace(self._address, self._port, self._count), self._device)
        self._offered[writer.number] = writer
        return writer

    def free(self, writer: GpuBuckets) -> None:
        """Offer a publication no more; what is being sent is sent to the end."""
        self._offered.pop(writer.number, None)

    def close(self) -> None:
        """Send nothing more."""
        self._closing.set()
        self._server.join()
        with self._guard:
            left = list(self._connections.values())
            self._connections.clear()
        for connection in left:
            connection.abort()
        self._offered.clear()

    def _serve(self) -> None:
        while not self._closing.wait(_POLL_S):
            try:
                while self._answer_next():
                    pass
            except Exception as error:  # whatever one request or the store fails with: others are still to be served
                logger.warning("a maker that asked for weights could not be answered (%s)", _line(error))

    def _answer_next(self) -> bool:
        """Answer the maker whose turn it is; return False if there is nobody to answer yet."""
        ticket, key = self._ticket, f"request/{self._ticket}"
        if self._store.add("requests", 0) < ticket:
            return False
        is_written = self._store.check([key])
        if not is_written:
            self._seen_at = self._seen_at or time.monotonic()
            if time.monotonic() - self._seen_at < _WRITTEN_S:
                return False
        self._ticket, self._seen_at = ticket + 1, 0.0
        request = _Request.read(self._store.get(key).decode()) if is_written else None
        self._store.delete_key(key)
        offered = None if request is None else self._offered.get(request.number)
        self._store.set(f"answer/{ticket}", "gone" if offered is None else "comes")
        if offered is not None:
            threading.Thread(target=self._send, args=(request, offered), name="weights", daemon=True).start()
        return True

    def _send(self, request: _Request, writer: GpuBuckets) -> None:
        deadline = Deadline(request.timeout_s)
        connection: Connection | None = None
        try:
            connection = self._connection_of(request, deadline)
            connection.exchange(writer.buckets, deadline.left_s())
        except Exception as error:  # whatever a transport fails with: the maker has its own deadline
            logger.warning("weights could not be sent to a maker (%s)", _line(error))
            if connection is not None:
                with self._guard:
                    if self._connections.get(request.maker) is connection:
                        del self._connections[request.maker]
                connection.abort()

    def _connection_of(self, request: _Request, deadline: Deadline) -> Connection:
        """Return the connection that a maker requests over, and leave the one that it had before."""
        with self._guard:
            former = self._connections.get(request.maker)
        if former is not None and former.name == request.connection:
            return former
        store = connect(self._address, self._port, deadline.left_s())
        connection = Connection(store, request.connection, 0, self._device)
        with self._guard:
            if self._closing.is_set():
                raise WeightsError("the publisher is closed; take what the trainer publishes next")
            former = self._connections.get(request.maker)
            self._connections[request.maker] = connection
        if former is not None:
            former.abort()
        return connection


class NcclReceiver:
    """A maker's end: requests publications over its connection with the trainer."""

    def __init__(self) -> None:
        self._maker = _own_name()
        self._connection: Connection | None = None
        self._port = ("", 0)
        self._store: Any = None

    @contextmanager
    def buckets(self, publication: Publication, timeout_s: float) -> Iterator[Received]:
        """Yield the buckets, in the memory of this process's device.

        Raises:
            WeightsError: if they are not offered any more, or the trainer is gone.
            TimeoutError: if they do not come in time.
        """
        place, version, device = publication.place, publication.version, own_device()
        deadline = Deadline(timeout_s)
        try:
            connection = self._request(place, deadline, version)
            bodies = [torch.empty(bucket.size, dtype=torch.uint8, device=device) for bucket in publication.buckets]
            _synchronise(device)  # whatever had their memory before is done with it
            connection.exchange(bodies, deadline.left_s())
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
            yield Received(bodies)
        finally:
            _synchronise(device)  # before they are given up

    def close(self) -> None:
        """Leave the connection."""
        if self._connection is not None:
            self._connection.abort()
        self._connection, self._store, self._port = None, None, ("", 0)

    def _request(self, place: NcclPlace, deadline: Deadline, version: int) -> Connection:
        """Return the connection over which the publication comes."""
        if self._connection is None or self._port != (place.host, place.port):
            self.close()
            self._store, self._port = connect(place.host, place.port, deadline.left_s()), (place.host, place.port)
            self._connection = Connection(self._store, uuid.uuid4().hex, 1, own_device())
        ticket = self._store.add("requests", 1)
        request = _Request(self._maker, self._connection.name, place.number, deadline.left_s())
        self._store.set(f"request/{ticket}", request.written())
        key = f"answer/{ticket}"
        try:
            self._store.wait([key], timedelta(seconds=deadline.left_s()))
        except dist.DistStoreError as error:
            raise TimeoutError(str(error)) from error
        answer = self._store.get(key).decode()
        self._store.delete_key(key)
        if answer != "comes":
            raise WeightsError(f"weights of version {version} are replaced by newer ones; take those")
        return self._connection


class Connection:
    """One end of a group of trainer (rank 0) and maker (rank 1); entered with the first exchange.

    Args:
        store: where the two find each other.
        name: of this connection alone.
        rank: of this end.
        device: of this end's buckets; NCCL carries those of a GPU, gloo those in host memory.
    """

    def __init__(self, store: Any, name: str, rank: int, device: torch.device) -> None:
        self.name = name
        self._store, self._rank, self._device = store, rank, device
        self._group: Any = None

    def exchange(self, buckets: Sequence[Tensor], timeout_s: float) -> None:
        """Send the buckets to the other end, or overwrite them with what the other end sends.

        Raises:
            TimeoutError: if it takes longer than `timeout_s`.
            RuntimeError: if the other end is lost.
        """
        within(timeout_s, lambda: self._carry(buckets, timeout_s))

    def abort(self) -> None:
        """Leave the group, and free whoever waits in it; one that is not left in time is left to itself."""
        group, self._group = self._group, None
        if group is not None:
            try:
                within(_ABORT_S, group.abort)
            except (TimeoutError, RuntimeError) as error:
                logger.warning("a group of trainer and maker could not be left (%s)", error)

    def _carry(self, buckets: Sequence[Tensor], timeout_s: float) -> None:
        with _own_stream(self._device):
            if self._group is None:
                store = dist.PrefixStore(f"connection/{self.name}", self._store)  # type: ignore[attr-defined]
                self._group = _new_group(store, self._rank, self._device, timeout_s)
            group = self._group
            for bucket in buckets:
                work = group.recv([bucket], 0, 0) if self._rank else group.send([bucket], 1, 0)
                work.wait()
            _synchronise(self._device)


def own_device() -> torch.device:
    """Return this process's GPU.

    Raises:
        WeightsError: if it has none that NCCL can use.
    """
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise WeightsError(
            "transport nccl sends weights from GPU to GPU, but this process has none; choose auto, which needs none"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _new_group(store: Any, rank: int, device: torch.device, timeout_s: float) -> Any:
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=timeout_s))
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)  # the deadline is kept by whoever waits: `within`
    options.global_ranks_in_group, options.group_name = [0, 1], f"weights-{uuid.uuid4().hex}"
    with _ENVIRONMENT:
        former = {name: os.environ.get(name) for name in _GROUP_ENVIRONMENT}
        os.environ.update(_GROUP_ENVIRONMENT)  # read when the group is made, and only then
        try:
            return dist.ProcessGroupNCCL(store, rank, 2, options)
        finally:
            for name, value in former.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def connect(address: str, port: int, timeout_s: float, listening: int | None = None) -> Any:
    """Return a connection of its own to a store: while one waits, nobody else can use it.

    Args:
        address: of the publisher's node.
        port: of the store.
        timeout_s: longest wait for it, now and later.
        listening: the descriptor of an open port, to keep the store in this process.
    """
    use_interface_towards(address)
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        is_master=listening is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def _own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a stream that the learner's own work does not wait for."""
    if device.type == "cpu":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def _synchronise(device: torch.device) -> None:
    """Wait until what this thread gave the GPU to do is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _own_name() -> str:
    """Return what this maker is called: an actor that Ray starts again keeps its name."""
    actor = ray.get_runtime_context().get_actor_id() if ray.is_initialized() else None
    return actor or uuid.uuid4().hex


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

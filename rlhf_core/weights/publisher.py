"""The trainer's side: lays weights out where the makers can fetch them, and frees what nobody needs any more."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import ray
import torch
from torch import Tensor

from rlhf_core.strategy.booster import Piece
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.weights.buckets import BucketWriter, Difference, Publication, lay_out
from rlhf_core.weights.difference import cast, changes, checksums
from rlhf_core.weights.in_parts import lay_out_pieces
from rlhf_core.weights.nccl import NcclSender, own_device
from rlhf_core.weights.object_store import ObjectStoreSender
from rlhf_core.weights.shared_memory import SharedMemorySender, has_shared_memory

Transport = Literal["shared_memory", "objects", "nccl"]


class Sender(Protocol):
    """The trainer's end of one transport: makes buckets reachable."""

    def begin(self) -> Any:
        """Return a `BucketWriter` for one publication."""

    def free(self, writer: Any) -> None:
        """Take back the writer of a publication that nobody needs, and its buckets."""

    def close(self) -> None:
        """Free everything."""


@dataclass(frozen=True, slots=True)
class _Kept:
    version: int
    writer: BucketWriter
    sender: Sender


class _Former(NamedTuple):
    version: int
    weights: Mapping[str, Tensor]


class Publisher:
    """Publishes versions of the weights, from the first trainer rank's process; all of them end with it.

    Args:
        transport: shared memory, within this node; objects, through Ray's store; nccl, from this process's GPU to
            the makers'; auto, shared memory if all makers are on this node, else objects.
        bucket_bytes: a bucket is closed when the next tensor would pass this; a larger tensor gets its own.
        dtype: what weights are cast to, once, but for the critic's head: the makers' `rollout_dtype`.
        sparse: lay out what changed since the version before as well, if that is at most half the bytes: makers that
            hold it fetch this alone. Takes memory for a copy of the weights, and time; for makers on other nodes.
    """

    def __init__(
        self,
        *,
        transport: Literal["auto", Transport] = "auto",
        bucket_bytes: int = 64 << 20,
        dtype: torch.dtype,
        sparse: bool = False,
    ) -> None:
        self._transport = transport
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._sparse = sparse
        self._former: _Former | None = None
        self._incarnation = uuid.uuid4().hex[:16]
        self._senders: dict[str, Sender] = {}
        self._kept: list[_Kept] = []
        self._guard = threading.Lock()
        """Versions may be retired by another thread than the one that publishes."""

    @property
    def form(self) -> dict[str, Any]:
        """What all processes that write one publication must have in common."""
        return {"dtype": self._dtype, "bucket_bytes": self._bucket_bytes}

    def publish(
        self, tensors: Iterable[tuple[str, Tensor]], *, version: int, fully: bool = True, nodes: Collection[str] = ()
    ) -> Publication:
        """Lay weights out as a version; return what a maker has to be told to take them.

        Args:
            tensors: names (`actor.x`, `critic.x`) and weights, of any dtype, on any device.
            version: counts up.
            fully: whether these are all weights, or only those that are trained.
            nodes: Ray's ids of the nodes that makers are on.
        """
        if not (self._sparse and fully):
            return self._lay_out(tensors, version, nodes, fully=fully)
        weights, former = cast(tensors, self._dtype), self._former
        whole = self._lay_out(weights.items(), version, nodes, fully=True)
        self._former = _Former(version, weights)
        changed = None if former is None else changes(former.weights, weights)
        if former is None or changed is None:
            return whole
        update = self._lay_out(changed.items(), version, nodes, fully=False)
        return replace(whole, difference=Difference(former.version, checksums(weights), update))

    def publish_pieces(
        self, pieces: Sequence[Piece], ranks: Ranks, *, version: int, fully: bool, nodes: Collection[str]
    ) -> Publication | None:
        """As `publish`, of what several processes hold in parts, in shared memory; the others call `write_pieces`.

        Args:
            pieces: of this process, the first.
            ranks: all processes.
            version: as for `publish`, as are those that follow.
            fully: whether these are all weights.
            nodes: Ray's ids.

        Returns:
            None, where the others return False, if they cannot all write to one place: then they are to be gathered.
        """
        with self._guard:
            sender = self._sender(nodes)
            writer = sender.begin() if isinstance(sender, SharedMemorySender) and not self._sparse else None
        if writer is None:
            ranks.broadcast_object(None)
            return None
        try:
            publication = lay_out_pieces(
                pieces, writer, ranks, version=version, fully=fully, incarnation=self._incarnation, **self.form
            )
        except BaseException:
            writer.release()  # another process may be writing still: it is not used again
            raise
        with self._guard:
            if publication is None:
                sender.free(writer)
            else:
                self._kept.append(_Kept(version, writer, sender))
        return publication

    def _lay_out(
        self, tensors: Iterable[tuple[str, Tensor]], version: int, nodes: Collection[str], *, fully: bool
    ) -> Publication:
        with self._guard:
            sender = self._sender(nodes)
            writer = sender.begin()
        try:
            publication = lay_out(
                tensors,
                writer,
                dtype=self._dtype,
                bucket_bytes=self._bucket_bytes,
                version=version,
                fully=fully,
                incarnation=self._incarnation,
            )
        except BaseException:
            with self._guard:
                sender.free(writer)
            raise
        with self._guard:
            self._kept.append(_Kept(version, writer, sender))
        return publication

    def retire(self, in_use: Collection[int]) -> None:
        """Free the buckets of all versions but these."""
        with self._guard:
            for kept in self._kept:
                if kept.version not in in_use:
                    kept.sender.free(kept.writer)
            self._kept = [kept for kept in self._kept if kept.version in in_use]

    def close(self) -> None:
        """Free everything; makers keep the weights that they have taken."""
        self.retire(())
        self._former = None
        with self._guard:
            for sender in self._senders.values():
                sender.close()
            self._senders.clear()

    def _sender(self, nodes: Collection[str]) -> Sender:
        here = {ray.get_runtime_context().get_node_id()} if ray.is_initialized() else set()
        is_local = set(nodes) <= here
        transport = self._transport
        if transport == "auto":
            transport = "shared_memory" if is_local and has_shared_memory() else "objects"
        address = "" if transport != "nccl" else "127.0.0.1" if is_local else ray.util.get_node_ip_address()
        key = f"{transport} {address}"
        if key not in self._senders:
            made: dict[str, Callable[[], Sender]] = {
                "shared_memory": lambda: SharedMemorySender(self._incarnation),
                "objects": ObjectStoreSender,
                "nccl": lambda: NcclSender(address, own_device()),
            }
            self._senders[key] = made[transport]()
        return self._senders[key]

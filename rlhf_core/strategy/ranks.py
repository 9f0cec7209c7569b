"""The processes that train one model together: what they agree on, and work that may fail on one of them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_core.errors import TrainingError
from rlhf_core.strategy import liveness
from rlhf_core.strategy.liveness import is_connection_error
from rlhf_core.strategy.rendezvous import Rendezvous, devices_of_all, enter_rendezvous, use_interface_towards

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Ranks:
    """This process among those that train one model together; alone, every method is the identity.

    Every collective is called by all ranks, in the same order. Tensors travel on the device that the backend works
    on (NCCL: this process's GPU, gloo: host memory) and come back on the device where they were.

    Args:
        rank: of this process, from 0.
        world_size: processes altogether.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and speaks for all."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, the same on each, as a new tensor without a graph."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """Return the largest over ranks, element by element; no element may be NaN, which backends order at will."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Return whether any rank says yes."""
        if self.world_size == 1:
            return flag
        return bool(self.max(torch.tensor(int(flag))).item())

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the rows of all ranks, one rank after the other; ranks may differ in their number of rows."""
        if self.world_size == 1:
            return tensor.detach()
        counts = self.sum(torch.eye(self.world_size, dtype=torch.long)[self.rank] * len(tensor)).tolist()
        start = sum(counts[: self.rank])
        rows = tensor.new_zeros((sum(counts), *tensor.shape[1:]))
        rows[start : start + len(tensor)] = tensor.detach()
        return self.sum(rows)  # each row is one rank's, and zero plus a number is the number

    def add_up(self, tensor: Tensor) -> None:
        """Overwrite the tensor, in place and without a copy where the backend takes it, with the sum over ranks."""
        if self.world_size == 1:
            return
        carried = tensor.detach().to(_carrier()).contiguous()  # the tensor itself, if it lies there already
        dist.all_reduce(carried)
        if carried.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(carried)

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite the tensor, in place, with that of rank 0."""
        if self.world_size == 1:
            return
        carried = tensor.detach().to(_carrier(), copy=True).contiguous()
        dist.broadcast(carried, src=0)
        with torch.no_grad():
            tensor.copy_(carried)

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's value, which JSON must hold: nothing is pickled."""
        if self.world_size == 1:
            return value
        body = json.dumps(value).encode() if self.is_first else b""
        length = torch.tensor(len(body))
        self.broadcast(length)
        held = torch.zeros(int(length), dtype=torch.uint8)
        if self.is_first:
            held = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        self.broadcast(held)
        found: T = json.loads(bytes(held.tolist()))
        return found

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            self.sum(torch.zeros(1)).item()  # with NCCL, only reading the result waits

    def _reduced(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world_size == 1:
            return tensor.detach()
        carried = tensor.detach().to(_carrier(), copy=True).contiguous()
        dist.all_reduce(carried, op=operation)
        return carried.to(tensor.device)


ALONE = Ranks()


def current_ranks() -> Ranks:
    """Return torch.distributed's default group, or `ALONE` where none was started.

    A rank that lost another stays what it was: whatever it would do together with the others fails.
    """
    if not (dist.is_available() and dist.is_initialized()):
        former = liveness.former_place()
        return ALONE if former is None else Ranks(*former)
    return Ranks(dist.get_rank(), dist.get_world_size())


def join(timeout_s: float = 600.0, *, rendezvous: Rendezvous | None = None) -> Ranks:
    """Join the processes that torchrun started, as its environment says, or those of a rendezvous; else train alone.

    NCCL where every process, on whichever machine, has a GPU of its own; else gloo, as NCCL refuses two ranks on one
    GPU. The ranks tell each other which GPU they see, so that all choose the same. It becomes the current device. From
    then on every rank sends heartbeats (`liveness`).

    Args:
        timeout_s: longest wait for the other ranks, then and in any collective, after which the process ends with an
            error instead of hanging.
        rendezvous: where the ranks meet; None is for torchrun.

    Raises:
        LostRankError: if a rank does not come in time.
    """
    if current_ranks() is not ALONE:
        return current_ranks()
    if rendezvous is None and (int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ):
        return ALONE
    timeout = timedelta(seconds=timeout_s)
    group = enter_rendezvous(rendezvous, timeout)
    monitor = liveness.Liveness(group)
    backend, reason = choose_backend(devices_of_all(group, _own_device()))
    level = logging.INFO if group.rank == 0 else logging.DEBUG
    logger.log(level, "%d ranks talk by %s: %s", group.world_size, backend, reason)
    liveness.begin(monitor)
    dist.init_process_group(
        backend, store=group.under("group"), rank=group.rank, world_size=group.world_size, timeout=timeout
    )
    return current_ranks()


def join_alone() -> Ranks:
    """Make a group of this process alone, for what works in groups only; nobody else can come in."""
    if not dist.is_initialized():
        backend, _ = choose_backend([_own_device()])
        use_interface_towards("127.0.0.1")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return current_ranks()


def choose_backend(devices: Sequence[str]) -> tuple[str, str]:
    """Return nccl or gloo, and the reason.

    Args:
        devices: of each rank, what identifies its GPU; empty where it has none.
    """
    without = [rank for rank, device in enumerate(devices) if not device]
    if len(without) == len(devices):
        return "gloo", "no rank has a GPU"
    if without:
        return "gloo", f"rank {without[0]} sees no GPU, others do"
    shared = [rank for rank, device in enumerate(devices) if devices.index(device) < rank]
    if shared:
        rank = shared[0]
        return "gloo", f"ranks {devices.index(devices[rank])} and {rank} share a GPU; give each its own for NCCL"
    return "nccl", "each rank has a GPU of its own"


def leave() -> None:
    """Leave the group that `join` entered; nothing where there is none."""
    liveness.end()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _own_device() -> str:
    """Make this process's GPU the current one, and return what identifies it; empty where NCCL has none to use."""
    gpus = torch.cuda.device_count()
    if not gpus:
        return ""
    # A launcher may show each process one GPU only, which is then its number 0.
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return uuid if dist.is_nccl_available() else ""


def _carrier() -> torch.device:
    """Return the device whose tensors the default group's backend takes."""
    if "nccl" in dist.get_backend() and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def together(ranks: Ranks, work: Callable[[], T], *, what: str) -> T:
    """Do a part of the work on every rank, and fail on all if it failed on one.

    Args:
        ranks: who works together.
        work: may raise. What communicates in it must fail on all ranks where it fails on one.
        what: the part, for the message on ranks that did not fail themselves: "read its prompts".

    Raises:
        TrainingError: if another rank failed; where this one failed, its own error is raised.
    """
    try:
        done = work()
    except Exception as error:
        if not is_connection_error(error):  # another collective would end in the midst of that one
            ranks.any(True)
        raise
    if ranks.any(False):
        raise TrainingError(f"another rank could not {what}; its own message says why")
    return done

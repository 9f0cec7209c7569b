"""The processes that train one model together: what they agree on, and work that may fail on one of them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_core.counting import counted
from rlhf_core.errors import ConfigError, TrainingError
from rlhf_core.strategy import liveness
from rlhf_core.strategy.liveness import is_connection_error
from rlhf_core.strategy.parts import WHOLE, Parts
from rlhf_core.strategy.rendezvous import Rendezvous, devices_of_all, enter_rendezvous, use_interface_towards

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Ranks:
    """This process among those that train one model together; alone, every method is the identity.

    Every collective is called by all ranks, in the same order. Tensors travel on the device that the backend works
    on (NCCL: this process's GPU, gloo: host memory) and come back on the device where they were.

    Where several processes hold one model together (`laid_out`), they have the same rows, and are one rank here: they
    differ in `shards`. Numbers are then added up between the ranks, while all processes agree and wait for each other.

    Args:
        rank: of this process, from 0.
        world_size: how many there are.
    """

    shards: Ranks
    """This process among those that hold one model together, each a part of it; alone where each holds all of it."""
    tensor: Ranks
    """Of these, those that have the same layers, in parts."""
    stages: Ranks
    """Of these, those that have the same part of other layers."""
    sequence: Ranks
    """Of these, those that have other tokens between attention and attention."""
    parts = WHOLE
    """Into which each model is cut."""
    everyone: Ranks
    """This process among all of them."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group: dist.ProcessGroup | None = None  # torch's default one
        alone = self if rank == 0 and world_size == 1 else ALONE
        self.shards = self.tensor = self.stages = self.sequence = alone
        self.everyone = self

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and speaks for all."""
        return self.everyone.rank == 0

    @property
    def speaks(self) -> bool:
        """Whether this is the process that writes what is this rank's own."""
        return self.shards.rank == 0

    @property
    def draws(self) -> int:
        """Which of the draws of dropout this process makes: those who have a matrix in parts drop the same."""
        return self.everyone.rank // self.tensor.world_size

    def laid_out(self, parts: Parts) -> Ranks:
        """Return the same processes, with as many neighbours as one rank as there are parts; called by all of them.

        Raises:
            ConfigError: if there are not a whole number of times as many, or the parts exclude each other.
        """
        if parts.fault:
            raise ConfigError(parts.fault)
        rank, number = self.everyone.rank, self.everyone.world_size
        if number % parts.number:
            raise ConfigError(
                f"a model in {parts} needs groups of {parts.number}, into which "
                f"{counted(number, 'process', 'processes')} cannot be cut; start a multiple of {parts.number}"
            )
        return self.everyone if parts.number == 1 else _laid_out(rank, number, parts)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, the same on each, as a new tensor without a graph."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """Return the largest over ranks, element by element; no element may be NaN, which backends order at will."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Return whether any rank says yes."""
        if self.everyone.world_size == 1:
            return flag
        return bool(self.everyone.max(torch.tensor(int(flag))).item())

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
        dist.all_reduce(carried, group=self._group)
        if carried.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(carried)

    def stack(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, which have one shape: [ranks ...]."""
        if self.world_size == 1:
            return tensor.detach()[None]
        carried = tensor.detach().to(_carrier()).contiguous()[None]
        everything = carried.new_empty((self.world_size, *tensor.shape))
        dist.all_gather_single(everything, carried, group=self._group)
        return everything.to(tensor.device)

    def sum_to_each(self, tensor: Tensor) -> Tensor:
        """Return this rank's of the sums over ranks, [...], of one tensor for each, [ranks ...]."""
        if self.world_size == 1:
            return tensor.detach()[0]
        carried = tensor.detach().to(_carrier()).contiguous()
        own = carried.new_empty((1, *carried.shape[1:]))
        dist.reduce_scatter_single(own, carried, group=self._group)
        return own[0].to(tensor.device)

    def exchange(self, tensor: Tensor) -> Tensor:
        """Return what each rank has for this one, of one tensor for each, [ranks ...]."""
        if self.world_size == 1:
            return tensor.detach()
        carried = tensor.detach().to(_carrier()).contiguous()
        found = torch.empty_like(carried)
        dist.all_to_all_single(found, carried, group=self._group)
        return found.to(tensor.device)

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite the tensor, in place, with that of the first process."""
        self.everyone.broadcast_from(tensor, 0)

    def broadcast_from(self, tensor: Tensor, rank: int) -> None:
        """Overwrite the tensor, in place, with that of a rank."""
        if self.world_size == 1:
            return
        carried = tensor.detach().to(_carrier(), copy=True).contiguous()
        dist.broadcast(carried, group=self._group, group_src=rank)
        with torch.no_grad():
            tensor.copy_(carried)

    def send(self, tensor: Tensor, rank: int) -> Callable[[], object]:
        """Begin to send a tensor to a rank, and return what waits until it may be forgotten."""
        carried = tensor.detach().to(_carrier()).contiguous()
        work = dist.isend(carried, group=self._group, group_dst=rank)

        def wait(_held: Tensor = carried) -> None:  # the tensor lives as long as somebody may wait
            if work is not None:
                work.wait()

        return wait

    def receive(self, tensor: Tensor, rank: int) -> Tensor:
        """Return what a rank sends, of the form of a tensor and on its device."""
        carried = torch.empty(tensor.shape, dtype=tensor.dtype, device=_carrier())
        dist.recv(carried, group=self._group, group_src=rank)
        return carried.to(tensor.device)

    def broadcast_object(self, value: T) -> T:
        """Return the first process's value, which JSON must hold: nothing is pickled."""
        if self.everyone.world_size == 1:
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
        """Wait until every process is here."""
        if self.everyone.world_size > 1:
            self.everyone.sum(torch.zeros(1)).item()  # with NCCL, only reading the result waits

    def _reduced(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.world_size == 1:
            return tensor.detach()
        carried = tensor.detach().to(_carrier(), copy=True).contiguous()
        dist.all_reduce(carried, op=operation, group=self._group)
        return carried.to(tensor.device)


ALONE = Ranks()


_layouts: dict[Parts, Ranks] = {}
"""Of this process's group."""


def _laid_out(rank: int, world_size: int, parts: Parts) -> Ranks:
    """Make the groups: those who hold a model are neighbours, the nearest those who talk in every layer."""
    if parts in _layouts:
        return _layouts[parts]
    grid = torch.arange(world_size).view(-1, parts.pp, parts.copies, parts.tp)
    timeout = _longest_wait()
    made: dict[tuple[tuple[int, ...], ...], Ranks] = {}

    def along(groups: Tensor) -> Ranks:
        """Return this process among those in its row."""
        rows = tuple(map(tuple, groups.tolist()))
        if rows not in made:  # all make all groups, in one order
            for members in rows:
                group = dist.new_group(list(members), timeout=timeout) if len(members) > 1 else None
                if rank in members:
                    made[rows] = Ranks(members.index(rank), len(members))
                    made[rows]._group = group
        return made[rows]

    models = along(grid.flatten(1).T)
    found = Ranks(models.rank, models.world_size)
    found._group, found.everyone = models._group, Ranks(rank, world_size)
    found.shards, found.tensor = along(grid.flatten(1)), along(grid.flatten(0, 2))
    found.stages, copies = along(grid.movedim(1, 3).flatten(0, 2)), along(grid.movedim(2, 3).flatten(0, 2))
    found.sequence, found.parts = found.tensor if parts.gathers else copies, parts
    _layouts[parts] = found
    return found


def _longest_wait() -> timedelta:
    """Return what the default group was given; what is new would wait as long as torch likes."""
    device = torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
    wait: timedelta = dist.group.WORLD._get_backend(device).options._timeout  # type: ignore[union-attr]
    return wait


def _forget_layouts() -> None:
    """Let go of the groups, whose connections stay open as long as somebody holds them."""
    for found in _layouts.values():
        for each in (found, found.shards, found.tensor, found.stages, found.sequence):
            each._group = None
    _layouts.clear()


liveness.before_closing.append(_forget_layouts)


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
    _forget_layouts()
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


class SharedState(NamedTuple):
    """Tensors, and plain facts that JSON holds."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


def share_state(state: SharedState | None, ranks: Ranks) -> SharedState | None:
    """Return the first process's state on every one; None if it has none.

    Args:
        state: of the first process; not looked at on the others.
        ranks: who shares it; called by all of them.
    """
    if ranks.everyone.world_size == 1:
        return state
    forms = {name: (list(tensor.shape), str(tensor.dtype)) for name, tensor in state.tensors.items()} if state else {}
    found = ranks.broadcast_object(None if state is None else {"forms": forms, "facts": dict(state.facts)})
    if found is None:
        return None
    tensors: dict[str, Tensor] = {}
    for name, (shape, dtype) in found["forms"].items():
        if state is not None and ranks.is_first:
            tensor = state.tensors[name].contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        ranks.broadcast(tensor.reshape(-1).view(torch.uint8))  # as bytes: not every backend takes every dtype
        tensors[name] = tensor
    return SharedState(tensors, found["facts"])

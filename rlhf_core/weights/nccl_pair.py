"""A group of two, of torch.distributed, that neither ends nor holds up its process when the other one is lost."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_core.strategy.rendezvous import use_interface_towards
from rlhf_core.weights.deadline import within
from rlhf_core.weights.publication import WeightsError

logger = logging.getLogger(__name__)

_ABORT_S = 5.0
"""Longest wait for a group to be left."""
_FOR_PAIRS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Else PyTorch ends the whole process when a peer is lost: a trainer must not die with a maker."""
_ENVIRONMENT = threading.Lock()


class Pair:
    """One end of a group of trainer (rank 0) and maker (rank 1); entered with the first exchange.

    Args:
        store: where the two find each other.
        name: of this pair alone.
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
                store = dist.PrefixStore(f"pair/{self.name}", self._store)  # type: ignore[attr-defined]
                self._group = _new_group(store, self._rank, self._device, timeout_s)
            group = self._group
            for bucket in buckets:
                work = group.recv([bucket], 0, 0) if self._rank else group.send([bucket], 1, 0)
                work.wait()
            synchronise(self._device)


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
        former = {name: os.environ.get(name) for name in _FOR_PAIRS}
        os.environ.update(_FOR_PAIRS)  # read when the group is made, and only then
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


def synchronise(device: torch.device) -> None:
    """Wait until what this thread gave the GPU to do is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()

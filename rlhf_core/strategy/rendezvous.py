"""How the processes of a group find each other: as torchrun's environment says, or at an address of the first one."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from rlhf_core.errors import LostRankError


class Rendezvous(NamedTuple):
    """Where one process meets the others of its group."""

    rank: int
    world_size: int
    address: str
    """Of the first rank's machine; 127.0.0.1 where all ranks are on it."""
    port: int
    listener: socket.socket | None = None
    """The first rank's, on which that port is open already, so that no other process can take it."""


class GroupStore(NamedTuple):
    """The key-value store that all ranks of a group share, as one of them sees it."""

    store: Any
    """torch.distributed's."""
    rank: int
    world_size: int
    kept_by_first: bool
    """Whether the store ends with the first rank; torchrun's own outlives it."""
    timeout: timedelta

    def under(self, prefix: str) -> Any:
        """Return the store with this prefix before each key, so that nobody else's keys are met."""
        return dist.PrefixStore(prefix, self.store)  # type: ignore[attr-defined]


def open_rendezvous(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on an address of this machine, for the first rank; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family)


def enter_rendezvous(rendezvous: Rendezvous | None, timeout: timedelta) -> GroupStore:
    """Meet the other ranks, at a rendezvous or as torchrun's environment says, and return the store of the group.

    Raises:
        LostRankError: if the others do not come in time.
    """
    try:
        if rendezvous is None:
            store, rank, world_size = next(torch_rendezvous("env://", timeout=timeout))
            kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        else:
            store, rank, world_size, kept = _store_of(rendezvous, timeout), rendezvous.rank, rendezvous.world_size, True
    except dist.DistError as error:
        raise LostRankError(
            f"waited {timeout.total_seconds():g} s for all ranks to come together, and they did not "
            f"({str(error).splitlines()[0]}); start them all, and look into the log of the one that is missing"
        ) from error
    store.set_timeout(timeout)
    return GroupStore(store, rank, world_size, kept, timeout)


def devices_of_all(group: GroupStore, own: str) -> list[str]:
    """Tell the others which GPU this rank has, empty for none; return what each says, the same list on every rank.

    Raises:
        LostRankError: if a rank does not come in time; it names it.
    """
    said = group.under("devices")
    said.set(str(group.rank), own)
    found = []
    for rank in range(group.world_size):
        try:
            found.append(said.get(str(rank)).decode())
        except dist.DistError as error:
            raise LostRankError(
                f"waited {group.timeout.total_seconds():g} s for rank {rank} of {group.world_size}, and it did not "
                "come; its own log says why"
            ) from error
    return found


def use_interface_towards(address: str) -> None:
    """Have gloo use the network interface that leads to an address, unless the user named one.

    Left alone, gloo takes the interface of the host's name: maybe another one, or one that others do not reach.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = probe.getsockname()[0]
    for name, places in psutil.net_if_addrs().items():
        if own in {place.address for place in places}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _store_of(rendezvous: Rendezvous, timeout: timedelta) -> Any:
    use_interface_towards(rendezvous.address)
    listening: Sequence[int] = () if rendezvous.listener is None else (rendezvous.listener.detach(),)
    return dist.TCPStore(  # type: ignore[attr-defined]
        rendezvous.address,
        rendezvous.port,
        rendezvous.world_size,
        is_master=rendezvous.rank == 0,
        timeout=timeout,
        wait_for_workers=False,  # they are waited for by name
        master_listen_fd=next(iter(listening), None),
    )

"""How the processes of a group find each other: by torchrun's environment, or where the first of them says."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from rlhf_core.errors import LostRankError


class Meeting(NamedTuple):
    """Where one process meets the others of its group."""

    rank: int
    world_size: int
    address: str
    """Of the first rank's machine; 127.0.0.1 where all ranks are on it."""
    port: int
    listener: socket.socket | None = None
    """The first rank's, on which that port is open already, so that no other process can take it."""


class Met(NamedTuple):
    """A process in the place where its group meets."""

    store: Any
    """torch.distributed's, common to all ranks."""
    rank: int
    world_size: int
    kept_by_first: bool
    """Whether the store goes when the first rank does; torchrun keeps it itself."""
    timeout: timedelta

    def part(self, name: str) -> Any:
        """Return a part of the store in which no other part's keys are met."""
        return dist.PrefixStore(name, self.store)  # type: ignore[attr-defined]


def open_meeting(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on an address of this machine, for the meeting's first rank; 0 is a free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family)


def enter(meeting: Meeting | None, timeout: timedelta) -> Met:
    """Return this process in the meeting, or, without one, where torchrun's environment says.

    Raises:
        LostRankError: if the others do not come in time.
    """
    try:
        if meeting is None:
            store, rank, world_size = next(rendezvous("env://", timeout=timeout))
            kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        else:
            store, rank, world_size, kept = _store_of(meeting, timeout), meeting.rank, meeting.world_size, True
    except dist.DistError as error:
        raise LostRankError(
            f"waited {timeout.total_seconds():g} s for all ranks to come together, and they did not "
            f"({str(error).splitlines()[0]}); start them all, and look into the log of the one that is missing"
        ) from error
    store.set_timeout(timeout)
    return Met(store, rank, world_size, kept, timeout)


def devices_of_all(met: Met, own: str) -> list[str]:
    """Say what identifies this rank's GPU, empty for none, and return what each rank says, the same list on every rank.

    Raises:
        LostRankError: if a rank does not come in time; it names it.
    """
    said = met.part("devices")
    said.set(str(met.rank), own)
    found = []
    for rank in range(met.world_size):
        try:
            found.append(said.get(str(rank)).decode())
        except dist.DistError as error:
            raise LostRankError(
                f"waited {met.timeout.total_seconds():g} s for rank {rank} of {met.world_size}, and it did not come; "
                "its own log says why"
            ) from error
    return found


def speak_towards(address: str) -> None:
    """Have gloo, which asks nobody who he is, use the interface that leads to an address, unless the user named one.

    Left alone it takes whatever the host's name stands for: another one, or none that others reach.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = probe.getsockname()[0]
    for name, places in psutil.net_if_addrs().items():
        if own in {place.address for place in places}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _store_of(meeting: Meeting, timeout: timedelta) -> Any:
    speak_towards(meeting.address)
    listening: Sequence[int] = () if meeting.listener is None else (meeting.listener.detach(),)
    return dist.TCPStore(  # type: ignore[attr-defined]
        meeting.address,
        meeting.port,
        meeting.world_size,
        is_master=meeting.rank == 0,
        timeout=timeout,
        wait_for_workers=False,  # they are waited for by name
        master_listen_fd=next(iter(listening), None),
    )

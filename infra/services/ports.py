"""Which ports the services listen on."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection, Sequence

import psutil

from infra import loopback
from infra.errors import ServiceError

_BELOW_THE_EPHEMERAL = range(15_000, 32_000)
"""No outgoing connection takes a port from here between our check and the service's bind."""


def is_free(port: int) -> bool:
    """Whether a service could listen on this port of the loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection's remains do not count
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
    return True


def free_port(taken: Collection[int] = ()) -> int:
    """Return a port that nothing listens on and that is not among those taken.

    Raises:
        ServiceError: if a thousand tries found none.
    """
    for port in random.sample(_BELOW_THE_EPHEMERAL, 1000):
        if port not in taken and is_free(port):
            return port
    raise ServiceError("no free port found between 15000 and 32000; end some of the programs that listen there")


def choose_port(
    what: str,
    *,
    demanded: int | None,
    variable: str,
    preferred: Sequence[int | None],
    taken: Collection[int] = (),
) -> int:
    """Return the port for a service: only the demanded one; without one, the first preferred one that is free, or any.

    Args:
        what: the service, for the message.
        demanded: the port that the user set, if any.
        variable: where the user sets it.
        preferred: the usual port and that of the last time, if there are any.
        taken: ports already given to others.

    Raises:
        ServiceError: if the demanded port is occupied.
    """
    if demanded is not None:
        if demanded not in taken and is_free(demanded):
            return demanded
        raise ServiceError(
            f"port {demanded} ({variable}) for {what} is occupied by another program; choose another port, or "
            f"unset {variable} to have a free one chosen"
        )
    for port in preferred:
        if port is not None and port not in taken and is_free(port):
            return port
    return free_port(taken)


def holder(port: int) -> psutil.Process | None:
    """Return the process that listens on a port of this machine; None if the system does not tell."""
    try:
        listening = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        pids = [each.pid for each in listening if each.laddr and each.laddr.port == port and each.pid]
        return psutil.Process(pids[0]) if pids else None
    except psutil.Error:  # another user's, or in a container of its own
        return None


def are_listening(processes: Collection[psutil.Process], port: int) -> bool:
    """Whether these processes listen on a port of the loopback address, and no others; True if nobody knows."""
    try:
        found = psutil.net_connections("tcp4")
    except psutil.Error:
        return True
    here = [each.pid for each in found if each.status == psutil.CONN_LISTEN and each.laddr == (loopback.ADDRESS, port)]
    return bool(here) and {process.pid for process in processes}.issuperset(here)  # another user's has no id here

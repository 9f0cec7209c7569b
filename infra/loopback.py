"""The loopback address: connections to it take no proxy, and check who listens before anything is sent."""

from __future__ import annotations

import errno
import socket
import ssl
import sys
from collections.abc import Collection, Mapping
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

ADDRESS = "127.0.0.1"
HOSTS = (ADDRESS, "localhost")
"""Its names; `localhost` may also be [::1], where a stack does not listen and another user can."""
_TABLE = Path("/proc/net/tcp")
_HERE = f"{int.from_bytes(socket.inet_aton(ADDRESS), sys.byteorder):08X}"
_LISTENS = "0A"


def open_url(request: str | Request, *, timeout_s: float, tls: ssl.SSLContext | None = None) -> HTTPResponse:
    """Open an address as `urlopen` does; an address of this machine is opened without a proxy.

    Args:
        request: or its address.
        timeout_s: longest wait for the connection, and for each piece of the answer.
        tls: how an https server is recognised; None: by the system's certificates.
    """
    url = request if isinstance(request, str) else request.full_url
    handlers: list[Any] = [HTTPSHandler(context=tls)] if tls else []
    if urlsplit(url).hostname in HOSTS:
        handlers.append(ProxyHandler({}))
    answer: HTTPResponse = build_opener(*handlers).open(request, timeout=timeout_s)
    return answer


def without_proxy(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep a process from using a proxy to this machine.

    Args:
        variables: its environment.
    """
    said = variables.get("no_proxy") or variables.get("NO_PROXY") or ""
    hosts = [each.strip() for each in said.split(",") if each.strip()]
    if "*" not in hosts:  # which must stand alone
        hosts += [each for each in HOSTS if each not in hosts]
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(hosts))


def expect(users: Collection[int], port: int) -> None:
    """Check who listens on a port, if the system tells it (Linux).

    A port where nobody listens is refused too: a stranger may listen there a moment later.

    Args:
        users: their ids.
        port: of the loopback address.

    Raises:
        ConnectionRefusedError: if none of these users does.
    """
    try:
        lines = _TABLE.read_text().splitlines()[1:]
    except OSError:
        return
    sockets = [line.split() for line in lines]
    owners = {int(words[7]) for words in sockets if words[1] == f"{_HERE}:{port:04X}" and words[3] == _LISTENS}
    if not owners:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
    if not owners <= set(users):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "a program of another user listens there")


def always_expect(users: Collection[int], port: int) -> None:
    """Make every connection of this process to a port check first who listens there, from now on.

    This holds for all clients: Prefect has a client for calls, another one for calls that do not wait, and web sockets.

    Args:
        users: as `expect` takes them.
        port: of the loopback address.
    """

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.connect" and arguments[1] == (ADDRESS, port):
            expect(users, port)

    sys.addaudithook(look)

"""The cluster of one command: what answers at an address and then is silent is not waited for."""

from __future__ import annotations

import socket
import time

import pytest
import ray

from rlhf_core.coati.roles.cluster import connected
from rlhf_core.coati.roles.flags import build_parser


@pytest.mark.parametrize("by", ["its address", "auto"])
def test_what_takes_a_connection_and_is_silent_is_named_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray has no deadline"))
    host = ray.util.get_node_ip_address()  # which Ray puts in place of 127.0.0.1
    with socket.create_server((host, 0)) as listener:
        address = f"{host}:{listener.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)  # where Ray looks first for a cluster of this machine
        given = "auto" if by == "auto" else address
        args = build_parser().parse_args(["--address", given, "--start_timeout_s", "1"])
        started = time.monotonic()
        silent = pytest.raises(TimeoutError, match=f"waited 1 s for the Ray cluster at {address}, and nothing was said")
        with silent, connected(args):
            pass
        assert time.monotonic() - started < 10

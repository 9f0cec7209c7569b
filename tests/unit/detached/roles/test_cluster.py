"""The cluster of one command: what answers at an address and then is silent is not waited for."""

from __future__ import annotations

import socket
import time

import pytest
import ray

from rlhf_core.detached.roles.cluster import connected
from rlhf_core.detached.roles.flags import build_parser


def test_what_takes_a_connection_and_is_silent_is_named_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray has no deadline"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        args = build_parser().parse_args(["--address", address, "--start_timeout_s", "1"])
        started = time.monotonic()
        silent = pytest.raises(TimeoutError, match=f"waited 1 s for the Ray cluster at {address}, and nothing was said")
        with silent, connected(args):
            pass
        assert time.monotonic() - started < 10

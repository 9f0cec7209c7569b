"""What goes over the loopback address takes no proxy, and only where the right user listens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import loopback
from infra.loopback import expect, open_url, without_proxy
from infra.settings import CHECKOUT

CLIENTS = """
import sys
from infra.loopback import always_expect, open_url
always_expect([int(sys.argv[2])], int(sys.argv[1]))
import asyncio, httpx, websockets.asyncio.client as sockets
url = f"http://127.0.0.1:{sys.argv[1]}/"

async def wait():
    async with httpx.AsyncClient(trust_env=False) as client:
        await client.get(url, timeout=1)

async def talk():
    async with sockets.connect(url.replace("http", "ws"), open_timeout=1):
        pass

for ask in (
    lambda: httpx.get(url, timeout=1, trust_env=False),
    lambda: asyncio.run(wait()),
    lambda: asyncio.run(talk()),
    lambda: open_url(url, timeout_s=1),
):
    try:
        ask()
    except Exception as error:
        print(type(error).__name__)
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.1)
        yield listening


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells it on Linux alone")
def test_a_port_is_expected_to_be_of_a_user_and_of_nobody_else(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    expect((0, os.geteuid()), port)
    with pytest.raises(ConnectionRefusedError, match="a program of another user listens there"):
        expect((os.geteuid() + 1,), port)
    listener.close()
    with pytest.raises(ConnectionRefusedError, match="nobody listens there"):
        expect((0, os.geteuid()), port)


def test_a_system_that_does_not_tell_is_believed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loopback, "_TABLE", tmp_path / "nowhere")
    expect((), 1)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells it on Linux alone")
@pytest.mark.integration
@pytest.mark.parametrize("is_strange", [True, False])
def test_no_client_of_any_kind_connects_to_another_users_port(listener: socket.socket, is_strange: bool) -> None:
    user = str(os.geteuid() + is_strange)
    words = [sys.executable, "-c", CLIENTS, str(listener.getsockname()[1]), user]
    said = subprocess.run(words, cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    if is_strange:
        assert said == ["ConnectError", "ConnectError", "ConnectionRefusedError", "URLError"]
        with pytest.raises(TimeoutError):
            listener.accept()
    else:
        assert said == ["ReadTimeout", "ReadTimeout", "TimeoutError", "TimeoutError"], "it answers nothing"
        assert [listener.accept()[0].close() for _ in said] == [None] * 4


def test_a_proxy_is_not_told_what_is_for_this_machine(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{listener.getsockname()[1]}")
    for host in ("127.0.0.1", "localhost"):
        with pytest.raises(OSError, match="refused"):
            open_url(f"http://{host}:1/", timeout_s=0.5)
    with pytest.raises(TimeoutError):
        listener.accept()
    with pytest.raises(TimeoutError):
        open_url("http://prefect.invalid/", timeout_s=0.5)
    listener.accept()[0].close()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"NO_PROXY": "a.example, localhost"}, "a.example,localhost,127.0.0.1"),
        ({"no_proxy": "b.example", "NO_PROXY": "a.example"}, "b.example,127.0.0.1,localhost"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_what_the_user_says_of_proxies_stays(said: dict[str, str], told: str) -> None:
    assert without_proxy(said) == {"NO_PROXY": told, "no_proxy": told}

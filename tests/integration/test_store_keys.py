"""The local store keeps its data whatever becomes of its keys: never had, lost, damaged, drawn anew."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from infra.services import processes, seaweed
from infra.services.seaweed import KEYS_FILE
from infra.services.service import Service
from tests.guard import stand_guard
from tests.integration import stranger

pytestmark = pytest.mark.integration

BODY = "what was stored " * 1000
EARLIER_FLAGS = {"admin.ui": "false", "webdav": "false", "s3.port.iceberg": 0, "s3.port.lance": 0}
"""Of the release that knew no keys."""


@pytest.fixture
def home() -> Iterator[Path]:
    """A home with a short name, for the store's sockets."""
    stand_guard()
    folder = Path(tempfile.mkdtemp(prefix="sk-", dir="/tmp"))
    for name in ("store", "logs", "sockets"):
        (folder / name).mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def running(home: Path, service: Callable[[Path, dict[str, int], Path], Service]) -> Iterator[str]:
    """Run the store, and give its address."""
    ports = seaweed.choose_ports({}, demanded=None, usual_first=False, taken=[])
    store = service(home, ports, home / "sockets")
    process: psutil.Process = store.spawn("keys-test")
    try:
        store.await_ready(process)
        seaweed.configure(home, ports)
        yield store.address
    finally:
        assert processes.end([process], grace_s=15) == []
        seaweed.remove_sockets(ports)


def of_this_release(home: Path, ports: dict[str, int], sockets: Path) -> Service:
    seaweed.prepare(home, lambda _: None, is_down=True)
    return seaweed.seaweed(home, ports, sockets)


def put(address: str, home: Path, name: str) -> None:
    key = (seaweed.ACCESS_KEY, seaweed.load_secret(home))
    assert stranger.s3(f"{address}/{seaweed.BUCKET}/{name}", "PUT", *key, body=BODY) == "200"


def get(address: str, home: Path, name: str) -> str:
    return stranger.s3(f"{address}/{seaweed.BUCKET}/{name}", "GET", seaweed.ACCESS_KEY, seaweed.load_secret(home))


def test_a_home_of_an_earlier_release_comes_up_with_its_data(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(seaweed, "CLOSED", EARLIER_FLAGS)
        earlier.setattr(seaweed, "keys_environment", lambda _: {})
        with running(home, seaweed.seaweed) as address:
            put(address, home, "old")
            anybody = stranger.http(f"{address}/{seaweed.BUCKET}/old")
            assert anybody == "403"
    assert not (home / KEYS_FILE).exists()
    with running(home, of_this_release) as address:
        assert get(address, home, "old") == "200"
        put(address, home, "new")
    with running(home, of_this_release) as address:
        assert get(address, home, "new") == "200"


@pytest.mark.stack
def test_keys_and_secret_that_are_lost_or_damaged_take_nothing_with_them(home: Path) -> None:
    with running(home, of_this_release) as address:
        put(address, home, "kept")
        keys = (home / KEYS_FILE).read_bytes()
        (home / KEYS_FILE).unlink()
        assert get(address, home, "kept") == "200"  # what runs has them
        put(address, home, "later")
        seaweed.prepare(home, lambda _: None, is_down=False)
    with running(home, of_this_release) as address:
        assert (home / KEYS_FILE).read_bytes() != keys
        assert get(address, home, "kept") == get(address, home, "later") == "200"
    (home / KEYS_FILE).write_bytes(keys[:100])
    former = seaweed.load_secret(home)
    (home / "store.secret").unlink()
    with running(home, of_this_release) as address:
        assert seaweed.load_secret(home) != former
        assert get(address, home, "kept") == "200"
        assert stranger.s3(f"{address}/{seaweed.BUCKET}/kept", "GET", seaweed.ACCESS_KEY, former) == "403"

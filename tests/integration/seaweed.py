"""A SeaweedFS server of the tests' own: import `seaweed_server`, and ask for the fixture `seaweed`."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.artifacts import S3Options, open_store
from infra.errors import StoreError

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
ATTEMPTS = 3
ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-key"
PORTS = ["s3", "master", "filer", "volume", "admin"]


@dataclass(frozen=True)
class Seaweed:
    """A running server with one bucket."""

    endpoint_url: str
    access_key: str
    secret_key: str
    bucket: str
    pid: int
    grpc_ports: tuple[int, ...]

    @property
    def options(self) -> S3Options:
        return S3Options(self.endpoint_url, self.access_key, self.secret_key, "us-east-1")


@pytest.fixture(scope="session", name="seaweed")
def seaweed_server() -> Iterator[Seaweed]:
    """A SeaweedFS server for the whole session, with an empty bucket `rlhf`."""
    with run_seaweed() as server:
        yield server


@contextmanager
def run_seaweed() -> Iterator[Seaweed]:
    """Start a server on free ports; end it, by its process id, and remove all that it wrote."""
    directory = Path(tempfile.mkdtemp(prefix="sw"))  # short: it holds sockets
    process = None
    try:
        for attempt in range(ATTEMPTS):  # a free port may be taken before the server binds it
            process, server = _start(directory / str(attempt))
            if _await_bucket(process, server):
                break
            _stop(process)
        else:
            log = (directory / str(attempt) / "log").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"SeaweedFS did not answer within {START_TIMEOUT_S:.0f} s:\n{log}")
        yield server
    finally:
        if process is not None:
            _stop(process)
            for port in server.grpc_ports:  # it puts these sockets into the system's folder, whatever TMPDIR says
                for leftover in Path(tempfile.gettempdir()).glob(f"seaweedfs-*-grpc-{port}.sock"):
                    leftover.unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _start(directory: Path) -> tuple[subprocess.Popen[bytes], Seaweed]:
    data, temporary = directory / "data", directory / "tmp"
    data.mkdir(parents=True)
    temporary.mkdir()
    # Every port, also gRPC's: their defaults are fixed, and two servers would collide.
    numbers = iter(free_ports(2 * len(PORTS)))
    ports = {name: (next(numbers), next(numbers)) for name in PORTS}
    flags = [f"-{name}.port={http}" for name, (http, _) in ports.items()]
    flags += [f"-{name}.port.grpc={grpc}" for name, (_, grpc) in ports.items()]
    flags += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", "-webdav=false"]
    flags += ["-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"]
    flags += [f"-filer.localSocket={temporary / 'f'}", f"-s3.localSocket={temporary / 's'}"]
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("weed"), "mini", f"-dir={data}", "-bucket=rlhf", *flags],
            env={**os.environ, **keys, "GOMEMLIMIT": "400MiB", "TMPDIR": str(temporary)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    endpoint = f"http://127.0.0.1:{ports['s3'][0]}"
    return process, Seaweed(
        endpoint, ACCESS_KEY, SECRET_KEY, "rlhf", process.pid, tuple(grpc for _, grpc in ports.values())
    )


def _await_bucket(process: subprocess.Popen[bytes], server: Seaweed) -> bool:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            open_store(f"s3://{server.bucket}/ready", cache_dir=Path("unused"), s3=server.options)
        except StoreError:
            time.sleep(0.1)
        else:
            return True
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_TIMEOUT_S)

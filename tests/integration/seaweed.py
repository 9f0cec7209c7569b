"""A SeaweedFS server of the tests' own: import `seaweed_server`, and ask for the fixture `seaweed`."""

from __future__ import annotations

import json
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
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from infra.artifacts import S3Options, open_store
from infra.errors import StoreError
from infra.services.seaweed import CLOSED, keys_environment, make_keys
from tests.guard import stand_guard

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
ATTEMPTS = 3
ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-key"
READER_KEY = "reader-access-key"
PORTS = ["s3", "master", "filer", "volume", "admin"]
WEED = Path(sys.executable).with_name("weed")


@dataclass
class Seaweed:
    """A server with one bucket, that can be stopped, killed and started again on what it wrote."""

    endpoint_url: str
    access_key: str
    secret_key: str
    bucket: str
    directory: Path
    ports: dict[str, tuple[int, int]]
    """Each service's own port, and that of its gRPC."""
    flags: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def options(self) -> S3Options:
        return S3Options(self.endpoint_url, self.access_key, self.secret_key, "us-east-1")

    @property
    def reader(self) -> S3Options:
        """One who may read and list, and nothing else."""
        return replace(self.options, access_key=READER_KEY)

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def start(self) -> None:
        """Start the server, on what is there; see `await_ready`."""
        assert self.process is None
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    WEED,
                    "-logtostderr=true",
                    "mini",
                    f"-bucket={self.bucket}",
                    *_flags(self.directory, self.ports),
                    *self.flags,
                ],
                env={
                    **os.environ,
                    **keys_environment(self.directory),
                    "GOMEMLIMIT": "400MiB",
                    "TMPDIR": str(self.directory / "tmp"),
                },
                cwd=self.directory / "data",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def await_ready(self) -> bool:
        """Return whether the bucket answers, before the server ends or the time is over."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.process is not None and self.process.poll() is None:
            try:
                open_store(f"s3://{self.bucket}/ready", cache_dir=Path("unused"), s3=self.options)
            except StoreError:
                time.sleep(0.1)
            else:
                return True
        return False

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """End the server with SIGKILL."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(STOP_TIMEOUT_S)
        self.process = None

    def stop(self) -> None:
        """End the server, if it runs."""
        if self.process is None:
            return
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process = None

    def shell(self, script: str) -> str:
        """Return what the administrator's shell prints on these commands."""
        # Without the second port after a dot, weed shell looks 10000 higher, and waits there for ever.
        addresses = [f"-{name}=127.0.0.1:{self.ports[name][0]}.{self.ports[name][1]}" for name in ("master", "filer")]
        done = subprocess.run(
            [WEED, "-logtostderr=true", "shell", *addresses],
            env={**os.environ, **keys_environment(self.directory)},
            input=script,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout + done.stderr


@pytest.fixture(scope="session", name="seaweed")
def seaweed_server() -> Iterator[Seaweed]:
    """A SeaweedFS server for the whole session, with an empty bucket `rlhf`."""
    with run_seaweed() as server:
        yield server


@contextmanager
def run_seaweed(*flags: str) -> Iterator[Seaweed]:
    """Start a server on free ports; end it, by its process id, and remove all that it wrote."""
    stand_guard()
    directory = Path(tempfile.mkdtemp(prefix="sw"))  # short: it holds sockets
    server = None
    try:
        for attempt in range(ATTEMPTS):  # a free port may be taken before the server binds it
            server = _server(directory / str(attempt), flags)
            server.start()
            if server.await_ready():
                break
            server.stop()
        else:
            assert server is not None
            raise RuntimeError(f"SeaweedFS did not answer within {START_TIMEOUT_S:.0f} s:\n{server.log[-2000:]}")
        yield server
    finally:
        if server is not None:
            server.stop()
            for _, port in server.ports.values():  # it puts these sockets into /tmp, whatever TMPDIR says
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


def _server(directory: Path, flags: tuple[str, ...]) -> Seaweed:
    for name in ("data", "tmp"):
        (directory / name).mkdir(parents=True)
    # Every port, also gRPC's: their defaults are fixed, and two servers would collide.
    numbers = iter(free_ports(2 * len(PORTS)))
    ports = {name: (next(numbers), next(numbers)) for name in PORTS}
    users = {ACCESS_KEY: ["Admin", "Read", "List", "Tagging", "Write"], READER_KEY: ["Read", "List"]}
    identities = [
        {"name": key, "credentials": [{"accessKey": key, "secretKey": SECRET_KEY}], "actions": actions}
        for key, actions in users.items()
    ]
    make_keys(directory, lambda _: None)
    (directory / "users.json").write_text(json.dumps({"identities": identities}))
    endpoint = f"http://127.0.0.1:{ports['s3'][0]}"
    return Seaweed(endpoint, ACCESS_KEY, SECRET_KEY, "rlhf", directory, ports, flags)


def _flags(directory: Path, ports: dict[str, tuple[int, int]]) -> list[str]:
    flags = [f"-dir={directory / 'data'}", f"-s3.config={directory / 'users.json'}"]
    flags += [f"-{name}.port={http}" for name, (http, _) in ports.items()]
    flags += [f"-{name}.port.grpc={grpc}" for name, (_, grpc) in ports.items()]
    flags += [f"-{name}={value}" for name, value in CLOSED.items()]
    flags += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", "-s3.autoCreateBucket=false"]
    return [*flags, f"-filer.localSocket={directory / 'tmp' / 'f'}", f"-s3.localSocket={directory / 'tmp' / 's'}"]

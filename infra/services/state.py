"""What is recorded of a stack: `stack.json` in the home directory, and the lock around changing it."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infra.errors import ServiceError
from infra.process_record import ProcessRecord

STATE_FILE = "stack.json"
LOCK_FILE = "stack.lock"
_OTHERS = 0o077


class ServiceRecord(BaseModel):
    """A started service."""

    model_config = ConfigDict(frozen=True)

    identity: ProcessRecord
    fingerprint: str
    """Digest of command, environment and versions: if it changes, the service must be restarted."""
    address: str
    log: Path

    @property
    def pid(self) -> int:
        """Its process id; it may be another process's once the service is gone."""
        return self.identity.pid

    def process(self) -> psutil.Process | None:
        """Return the service's process, or None when it is gone."""
        return self.identity.process()


class StackState(BaseModel):
    """A stack: what runs, where, and what was deployed to it."""

    schema_version: int = 1
    id: str = Field(default_factory=lambda: secrets.token_hex(6))
    """The value of RLHF_STACK in the environment of all its processes."""
    socket_dir: Path | None = None
    """Short, private, in the system's temp folder: a Unix socket's name has at most 107 bytes."""
    ports: dict[str, int] = Field(default_factory=dict)
    """Kept while the stack is down: if the usual ports are occupied, the addresses stay as they were."""
    services: dict[str, ServiceRecord] = Field(default_factory=dict)
    database: str | None = None
    """Where the server's data were kept the last time: `sqlite`, `postgres`, or `own` for a database of the user's."""
    deployed: str | None = None
    """Digest of what the deployments were made from."""
    filed: dict[str, dict[str, dict[str, Any]]] = Field(default_factory=dict)
    """By server and deployment, what prefect.yaml said when it was last registered: what differs is a person's."""
    supervisor: ProcessRecord | None = None
    """The process that brings services back; it ends once it is no longer named here."""

    @classmethod
    def load(cls, home: Path) -> StackState:
        """Return the state of the stack in this home, or a new one.

        Raises:
            ServiceError: if the file cannot be read or makes no sense.
        """
        path = home / STATE_FILE
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return cls()
        except (ValidationError, OSError) as error:
            raise ServiceError(
                f"{path} is damaged ({str(error).splitlines()[0]}); end the processes that it names, then delete it"
            ) from None

    def save(self, home: Path) -> None:
        """Write the state, whole or not at all."""
        write_private(home / STATE_FILE, self.model_dump_json(indent=1))


def write_private(path: Path, text: str) -> None:
    """Replace a file, whole or not at all, readable by its owner alone.

    Raises:
        ServiceError: if it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise ServiceError(
            f"{path} cannot be written ({error.strerror}); move away what is there, or make room"
        ) from None


def exposure(there: os.stat_result) -> str | None:
    """Return what is wrong with a file that only its owner should read, for people; None: nothing."""
    if there.st_uid != os.geteuid():
        return "belongs to another user"
    if there.st_mode & _OTHERS:
        return f"can be read by others (its mode is {there.st_mode & 0o777:04o}, not 0600)"
    return None


def exposure_of(path: Path) -> str | None:
    """Return the same for the file at a path; None if there is none."""
    try:
        return exposure(path.stat())
    except OSError:
        return None


def is_private_directory(path: Path) -> bool:
    """Whether a path is a directory, and no link to one, that is ours and that nobody else can enter."""
    try:
        there = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(there.st_mode) and exposure(there) is None


def make_home(home: Path) -> None:
    """Create the home directory, private to its owner.

    Raises:
        ServiceError: if nothing can be written there.
    """
    probe = home / LOCK_FILE.replace(".lock", ".probe")
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ServiceError(
            f"RLHF_HOME is {home}, where nothing can be written ({error.strerror}); set it to a directory of your own"
        ) from None


@contextmanager
def locked(home: Path, report: Callable[[str], None], *, timeout_s: float = 300.0) -> Iterator[None]:
    """Hold the stack's lock: two commands never change a stack at once.

    Raises:
        ServiceError: if another command held it all the time.
    """
    file = home / LOCK_FILE
    lock = FileLock(file, timeout=timeout_s, mode=0o600, poll_interval=0.1, fallback_to_soft=False)
    try:
        held = lock.acquire(blocking=False)
    except Timeout:
        report(f"another rlhf command (process {file.read_text().strip() or '?'}) is changing the stack; waiting")
        try:
            held = lock.acquire()
        except Timeout:
            raise ServiceError(
                f"another rlhf command has been changing the stack in {home} for {timeout_s:g} s; wait for it or end it"
            ) from None
    with held:
        file.write_text(str(os.getpid()))
        yield


def is_locked(home: Path) -> bool:
    """Whether a command is changing the stack."""
    lock = FileLock(home / LOCK_FILE, mode=0o600, fallback_to_soft=False)
    try:
        with lock.acquire(blocking=False):
            return False
    except Timeout:
        return True

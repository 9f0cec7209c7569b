"""One service of the stack: how it is started, and how we see that it works."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

from infra.errors import ServiceError
from infra.loopback import without_proxy
from infra.process_record import ProcessRecord, is_live
from infra.services import processes
from infra.services.ports import are_listening
from infra.services.state import ServiceRecord
from infra.settings import inherited_environment

Report = Callable[[str], None]

_NOT_INHERITED = (
    *(
        "PREFECT_API_",
        "PREFECT_CLIENT_CUSTOM_HEADERS",
        "PREFECT_PROFILE",
        "PREFECT_HOME",
        "PREFECT_SERVER_",
        "PREFECT__",
    ),
    *("RLHF_S3_", "RLHF_STORE_URL", "RLHF_DATABASE_URL"),
)
"""A user's other server, another run's identity, other credentials: what a service needs of these is set again.

The user's settings of this server (PREFECT_SERVER_...) are for the server alone: see `prefect_server`.
"""


@dataclass(frozen=True)
class Service:
    """What it takes to start a service and to see that it works."""

    name: str
    title: str
    """For people."""
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables beside the inherited ones."""
    cwd: Path
    log: Path
    address: str
    probe: Callable[[psutil.Process], str | None]
    """Returns None when the service works, else what is missing."""
    start_timeout_s: float
    settle_timeout_s: float
    """How long we wait for a running one that does not answer, before it counts as broken."""
    packages: tuple[str, ...] = ()
    """What the program is made of: a process of another version is replaced."""

    @property
    def fingerprint(self) -> str:
        """Digest of what the service was started with."""
        versions = [version(package) for package in self.packages]
        text = json.dumps([self.command, sorted(self.environment.items()), str(self.cwd), versions])
        return hashlib.sha256(text.encode()).hexdigest()

    def spawn(self, stack_id: str) -> psutil.Process:
        """Start the program; it may not answer yet.

        Raises:
            ServiceError: if there is no such program.
        """
        environment = stack_environment(stack_id, self.environment)
        try:
            return processes.spawn(self.command, environment=environment, cwd=self.cwd, log=self.log)
        except OSError as error:
            raise ServiceError(
                f"{self.title} cannot be started: {self.command[0]}: {error.strerror}; run `make setup`"
            ) from None

    def record(self, process: psutil.Process) -> ServiceRecord:
        """Return the record of a started service."""
        return ServiceRecord(
            identity=ProcessRecord.of(process.pid),
            fingerprint=self.fingerprint,
            address=self.address,
            log=self.log,
        )

    def await_ready(self, process: psutil.Process, *, timeout_s: float | None = None) -> None:
        """Wait until the service works.

        Raises:
            ServiceError: if it ended or did not answer in time; the last line of its log is part of the sentence.
        """
        limit = self.start_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        while True:
            if not is_live(process):  # or somebody else may answer in its place
                raise ServiceError(f"{self.title} ended while it started: {last_words(self.log)}")
            if (missing := self.probe(process)) is None:
                return
            if time.monotonic() > deadline:
                raise ServiceError(f"{self.title} {missing} after {limit:g} s: {last_words(self.log)}")
            time.sleep(0.1)


def stack_environment(stack_id: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process of the stack: this one's, our programs first on the path, the variables.

    Calls to the stack do not go through a proxy that this process uses.
    """
    inherited = inherited_environment(without_prefixes=(*_NOT_INHERITED, "WEED_"))  # SeaweedFS's: ours are all it gets
    return {
        **inherited,
        **without_proxy(inherited),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), inherited.get("PATH", os.defpath))),
        **variables,
        processes.STACK_VARIABLE: stack_id,
    }


def answers_itself(process: psutil.Process, port: int, *, healthy: bool) -> str | None:
    """Return what is wrong with a service that should answer on a port: None if it answers, and nobody else does.

    Args:
        process: the service's.
        port: of the loopback address.
        healthy: whether something answers there as the service would.
    """
    if not healthy:
        return "did not answer"
    return None if are_listening(processes.tree(process), port) else "does not have its port, on which another answers,"


def last_words(log: Path, *, most: int = 400) -> str:
    """Return the end of a log, in one line, and where the rest is."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            lines = [" ".join(line.split()) for line in file.read().decode("utf-8", "replace").splitlines()]
    except OSError:
        return f"there is no log at {log}"
    told = [line for line in lines if line]
    errors = [line for line in told if "error" in line.lower()]
    words = (errors or told or ["it said nothing"])[-1]
    return f"{words[:most]!r} (all of it is in {log})"

"""What is known of a leased cluster: enough to reach it, and to end it without help."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from infra.errors import ClusterError
from infra.process_record import ProcessRecord

MARK_VARIABLE = "RLHF_CLUSTER"
"""Environment variable that every process of a cluster inherits; its value is the cluster's mark."""
JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Of Ray: how a driver's actors start, if somebody has said so."""
_NOWHERE = Path(os.devnull)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class ClusterRecord(BaseModel):
    """A cluster's record; a local one's is on disk, from before its first process until after its last."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    schema_version: Literal[1] = 1
    kind: Literal["local", "existing"] = "local"
    """Started for the run, or a user's own, of which only the run's actors are ours."""
    name: str
    mark: str
    """Random; stands in the environment of every process of the cluster."""
    owner: ProcessRecord
    """The process that holds the lease."""
    watchdog: ProcessRecord | None = None
    """The process that ends the cluster when the owner is gone."""
    head: tuple[ProcessRecord, ...] = ()
    """Ray's own two processes, its control server first; empty while the cluster starts."""
    address: str = ""
    """Host and port of the control server; empty while the cluster starts."""
    namespace: str = "rlhf"
    """Ray namespace of the run's named actors."""
    temp_dir: Path = _NOWHERE
    """Ray's sockets, logs and spilled objects, token and certificate; mode 0700. An existing cluster has its own."""
    log_dir: Path = _NOWHERE
    """Kept when the cluster is gone: the output of `ray start`, the watchdog's and Ray's logs."""
    created: datetime = Field(default_factory=lambda: datetime.now(UTC))

    @property
    def ray_dir(self) -> Path:
        """Ray's own part of the temp dir. Ray opens it to every user, so a closed one is around it."""
        return self.temp_dir / "r"

    @property
    def token(self) -> Path:
        """File with the cluster's authentication token, mode 0600."""
        return self.temp_dir / "token"

    @property
    def certificate(self) -> Path:
        """File with the cluster's certificate and its private key, mode 0600."""
        return self.temp_dir / "tls.pem"

    @property
    def fork_socket(self) -> Path:
        """Socket of the server that forks actors' processes; not there if the cluster was started without."""
        return self.temp_dir / "fork"

    @property
    def secrets(self) -> dict[str, str]:
        """The variables by which a process of the cluster, or its driver, shows and checks token and certificate."""
        parts = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token),
            "RAY_USE_TLS": "1",
            **dict.fromkeys(parts, str(self.certificate)),
        }

    @property
    def logs(self) -> str:
        """Where a person finds out more."""
        return str(self.log_dir) if self.kind == "local" else "the logs of that cluster"

    @property
    def head_pid(self) -> int:
        """Process id of Ray's control server; 0 while the cluster starts."""
        return self.head[0].pid if self.head else 0

    @property
    def watchdog_pid(self) -> int:
        """Process id of the watchdog; 0 before it has started."""
        return self.watchdog.pid if self.watchdog else 0

    @property
    def is_running(self) -> bool:
        """Whether both of Ray's own processes are there."""
        return bool(self.head) and all(each.process() is not None for each in self.head)

    def save(self, path: Path) -> None:
        """Write it whole or not at all."""
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(self.model_dump_json(indent=2) + "\n")
        draft.chmod(0o600)
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a record.

        Raises:
            ClusterError: if it is not one.
            FileNotFoundError: if it is not there.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise ClusterError(
                f"{path} is not the record of a cluster of this version (faults: "
                f"{error.error_count()}, the first: {error.errors()[0]['msg']}); if no cluster of that name runs, "
                "delete it"
            ) from error


def record_path(directory: Path, name: str) -> Path:
    """Return where the record of a cluster lies.

    Raises:
        ClusterError: if the name could not be that of a file.
    """
    return directory / f"{checked_name(name)}.json"


def checked_name(name: str) -> str:
    """Return a cluster's name if it can be part of a file's name and of a namespace.

    Raises:
        ClusterError: if it cannot.
    """
    if not _NAME.fullmatch(name):
        raise ClusterError(
            f"{name!r} is no name for a cluster; take letters, digits, '.', '_' and '-', at most 100 of them"
        )
    return name

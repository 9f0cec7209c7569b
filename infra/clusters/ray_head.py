"""Starts the head of a Ray cluster in its own session, with its own ports, token, certificate and temp dir.

The token alone is not enough: Ray's ports answer some calls of anyone, and a call to `RaySyncer.StartSync` without the
metadata that Ray itself sends ends the control server before it asks for a token. With TLS on both sides nothing
answers without the cluster's certificate.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from infra.certificate import own_certificate
from infra.clusters.reaper import TEMP_PREFIX, leftover_processes
from infra.clusters.record import JOB_CONFIG_VARIABLE, MARK_VARIABLE, ClusterRecord
from infra.errors import ClusterError, ClusterNotReadyError
from infra.forked_processes import server_command, server_environment
from infra.process_record import ProcessRecord
from infra.settings import inherited_environment

logger = logging.getLogger(__name__)

MIN_OBJECT_STORE_MB = 80
"""Ray refuses less than 75 MiB."""
_FORKING_TIMEOUT_S = 20.0
_LONGEST_TEMP_DIR = 40
"""A Unix socket's path has at most 107 bytes (103 on macOS), and 63 or fewer are appended to the temp dir."""
_NOT_INHERITED = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE")
"""They would connect the new cluster to another one, to which the starting process belongs."""
_FOR_PREFECT = (
    *("PREFECT_API_AUTH_STRING", "PREFECT_API_KEY", "PREFECT_CLIENT_CUSTOM_HEADERS"),
    *("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_SERVER_DATABASE_", "RLHF_DATABASE_URL"),
)
"""Actors do not use the Prefect server or its database. If they read the store's keys from the server, they get what
that takes separately."""
SILENT_NODE = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "4",
}
"""Make the control server give up a machine that is silent for 24 s; Ray's default is 65. Callers wait 30 s for an
actor's answer: their next attempt then finds the machine's actors gone and their names free. A shorter time would also
give up a machine whose cores are all busy for a while. Only the head reads them."""
ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Make a cluster of one machine use the loopback address and listen on no other, as Ray does on the systems in the
name. By default it takes the host's address and listens on all, whatever `--node-ip-address` says."""


class Head(NamedTuple):
    """A started head."""

    address: str
    processes: tuple[ProcessRecord, ...]


def new_temp_dir() -> Path:
    """Return a path for Ray's files, short enough for its sockets; nothing is there yet.

    Raises:
        ClusterError: if the system's temp folder has too long a name.
    """
    path = Path(tempfile.gettempdir()) / f"{TEMP_PREFIX}{secrets.token_hex(4)}"
    if len(os.fsencode(path)) > _LONGEST_TEMP_DIR:
        raise ClusterError(
            f"the temporary folder {path.parent} has too long a name for Ray's sockets (at most "
            f"{_LONGEST_TEMP_DIR - len(path.name) - 1} characters); set TMPDIR to a shorter one"
        )
    return path


def start_head(
    record: ClusterRecord,
    *,
    num_cpus: int,
    num_gpus: float,
    object_store_mb: int,
    timeout_s: float,
    environment: Mapping[str, str],
    imported: Sequence[str] = (),
) -> Head:
    """Start `ray start --head` and wait until its node is up.

    Args:
        record: says where its files go, and its mark.
        num_cpus: logical CPUs.
        num_gpus: logical GPUs; rounded up, Ray counts a node's in whole ones.
        object_store_mb: shared memory.
        timeout_s: longest wait.
        environment: variables for all processes of the cluster.
        imported: modules that are imported once for all actors' processes.

    Returns:
        The address and Ray's own processes. On an error, processes may be left: the caller ends the cluster.

    Raises:
        ClusterError: if it does not start, or not in time.
    """
    if object_store_mb < MIN_OBJECT_STORE_MB:
        raise ClusterError(
            f"cluster {record.name!r} is to have an object store of {object_store_mb} MB, but Ray needs at "
            f"least {MIN_OBJECT_STORE_MB}; raise object_store_mb"
        )
    record.temp_dir.mkdir(mode=0o700)
    for path, secret in {
        record.token: secrets.token_hex(32),
        record.certificate: own_certificate(f"rlhf cluster {record.mark[:8]}"),
    }.items():
        path.touch(mode=0o600)
        path.write_text(secret)
    if imported and JOB_CONFIG_VARIABLE not in os.environ:
        _start_forking(record, imported, environment)
    command = _command(record, num_cpus, math.ceil(num_gpus), object_store_mb)
    _run(record, command, timeout_s, environment)
    address = (record.ray_dir / "ray_current_cluster").read_text().strip()
    return Head(address, _own_processes(record))


def _command(record: ClusterRecord, num_cpus: int, num_gpus: int, object_store_mb: int) -> list[str]:
    """Every port that is not named is chosen by the system when it is bound, so clusters cannot collide."""
    command = [sys.executable, "-P", "-m", "infra.clusters.ray_start", "start", "--head", "--port=0"]
    command += [f"--temp-dir={record.ray_dir}", "--log-style=record", "--disable-usage-stats"]
    command += [f"--num-cpus={num_cpus}", f"--num-gpus={num_gpus}"]
    command += [f"--object-store-memory={object_store_mb * 1024 * 1024}"]
    # Not needed, and each costs a process of 100 MB: the autoscaler, the log monitor, the dashboard.
    command += ["--no-monitor", "--include-log-monitor=false", "--include-dashboard=false"]
    return command


def _run(record: ClusterRecord, command: list[str], timeout_s: float, environment: Mapping[str, str]) -> None:
    log = record.log_dir / "ray-start.log"
    with log.open("wb") as output:
        starter = subprocess.Popen(
            command,
            env=_environment(record, environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = starter.wait(timeout_s)
    except BaseException as error:
        starter.kill()
        starter.wait()  # at once: it was killed, and would stay a zombie
        if isinstance(error, subprocess.TimeoutExpired):
            raise ClusterNotReadyError(
                f"Ray cluster {record.name!r} did not start within {timeout_s:g} s; raise start_timeout_s, or see {log}"
            ) from error
        raise
    if code != 0:
        lines = log.read_text(errors="replace").strip().splitlines() or ["nothing"]
        raise ClusterNotReadyError(
            f"Ray cluster {record.name!r} did not start: `ray start` ended with {code} and said "
            f"{lines[-1].strip()!r}; all of its output is in {log}"
        )


def _start_forking(record: ClusterRecord, imported: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start the server that actors' processes are forked from, which imports while Ray starts; or go on without it."""
    log = record.log_dir / "forked-processes.log"
    try:
        with log.open("wb") as output:
            subprocess.run(
                server_command(record.fork_socket, imported, verb="start"),
                env=server_environment(_environment(record, environment)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                timeout=_FORKING_TIMEOUT_S,
                check=True,
            )
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("actors of cluster %r import for themselves (%s); see %s", record.name, error, log)


def _environment(record: ClusterRecord, extra: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment, changed for the cluster; nothing of it is read as a setting."""
    return {
        **inherited_environment(without_prefixes=(*_NOT_INHERITED, *_FOR_PREFECT)),
        # Actors start within a second without idle workers, of which Ray keeps one of 80 MB per CPU.
        "RAY_prestart_worker_first_driver": "0",
        **SILENT_NODE,
        **extra,
        **ON_LOOPBACK,
        **record.secrets,
        "RAY_USAGE_STATS_ENABLED": "0",
        MARK_VARIABLE: record.mark,
        "SPT_NOENV": "1",  # or setproctitle, in Ray's agents, writes the title over the mark
    }


def _own_processes(record: ClusterRecord) -> tuple[ProcessRecord, ...]:
    """Find the control server and the raylet: without either, the cluster is lost."""
    by_name: dict[str, int] = {}
    for process in leftover_processes(record.mark):
        try:
            by_name[process.name()] = process.pid
        except psutil.Error:
            continue
    try:
        return tuple(ProcessRecord.of(by_name[name]) for name in ("gcs_server", "raylet"))
    except (KeyError, psutil.Error) as error:
        raise ClusterNotReadyError(
            f"Ray cluster {record.name!r} lost a process while it started: of gcs_server and raylet, only "
            f"{sorted({'gcs_server', 'raylet'} & set(by_name))} run; see {record.log_dir}"
        ) from error

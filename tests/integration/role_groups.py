"""Clusters of several nodes for `train_prompts_on_ray`, and what runs on them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import ray

from infra.clusters import ClusterRecord, leftover_processes
from infra.clusters.record import MARK_VARIABLE


def add_node(record: ClusterRecord, *, num_cpus: int) -> None:
    """Let a second node join a cluster: another raylet of this machine, which ends with the cluster."""
    command = [sys.executable, "-P", "-m", "infra.clusters.ray_start", "start", f"--address={record.address}"]
    command += [f"--num-cpus={num_cpus}", "--num-gpus=0", f"--object-store-memory={100 << 20}", "--log-style=record"]
    command += ["--include-log-monitor=false", "--disable-usage-stats"]
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(record.token),
        "RAY_prestart_worker_first_driver": "0",
        MARK_VARIABLE: record.mark,
        "SPT_NOENV": "1",
    }
    subprocess.run(
        command, env={**os.environ, **environment}, check=True, timeout=120, start_new_session=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip


def processes_of(record: ClusterRecord, actor: str) -> list[psutil.Process]:
    """Return the processes of a cluster's actors of one class."""
    found = []
    for process in leftover_processes(record.mark):
        with suppress(psutil.Error):
            if any(word.startswith(f"ray::{actor}") for word in process.cmdline()):
                found.append(process)
    return found


def await_free(cpus: float, timeout_s: float = 30.0) -> None:
    """Wait until all CPUs of the cluster are free again: no actor is left."""
    deadline = time.monotonic() + timeout_s
    while ray.available_resources().get("CPU", 0) != cpus:
        assert time.monotonic() < deadline, f"of {cpus} CPUs, {ray.available_resources().get('CPU', 0)} are free"
        time.sleep(0.2)

"""The process worker that runs flows on this machine, and its work pool."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import psutil

from infra.errors import ServiceError
from infra.services import prefect_api
from infra.services.prefect_server import prefect_environment
from infra.services.service import Service

WORK_POOL = "rlhf"
WORKER_NAME = "local"
PATIENCE_S = 960.0
"""How long a run waits for a server that is away: no run is lost if the server is away for a quarter of an hour. The
worker waits for a day, and then reports how its runs ended."""
EVERY_WORKER = {
    # Its clients wait for a server that is away (infra/patience.py) where the plugin is loaded.
    "PREFECT_PLUGINS_ENABLED": "true",
    "PREFECT_PLUGINS_ALLOW": "rlhf-flows",
    "RLHF_SERVER_PATIENCE_S": f"{PATIENCE_S:.0f}",
    # Elsewhere they wait 2, 4, ... 128 s, without bound: twice as many retries would be a day.
    "PREFECT_CLIENT_MAX_RETRIES": "7",
    "PREFECT_WORKER_ENABLE_CANCELLATION": "true",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    # A run's log says what it waits for, and that a base was changed; what other threads say stays in the process's.
    "PREFECT_LOGGING_EXTRA_LOGGERS": "infra,rlhf_core.models",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}
"""Environment of a worker and its flows wherever they run; the files of infra/deploy have the same."""
_HEARTBEAT_S = 5
_STALE_S = 4.0 * _HEARTBEAT_S
_ANSWER_S = 10.0


def make_work_pool(api_url: str) -> None:
    """Create the work pool unless it is there.

    Raises:
        ServiceError: if the server does not answer.
    """
    path = f"/work_pools/{WORK_POOL}"
    if prefect_api.call(api_url, "GET", path) is None:
        try:
            prefect_api.call(api_url, "POST", "/work_pools/", {"name": WORK_POOL, "type": "process"})
        except ServiceError:
            if prefect_api.call(api_url, "GET", path) is None:
                raise
            # a worker that still runs has made it meanwhile, on a server with a new database


def worker(home: Path, socket_dir: Path, api_url: str, environment: Mapping[str, str]) -> Service:
    """Return the worker as a service.

    Args:
        home: its log lies under it.
        socket_dir: closed to others; the socket of the server that its flows are forked from lies there.
        api_url: the Prefect server's.
        environment: what flows need to find the artifact store.
    """
    command = (sys.executable, "-m", "prefect", "worker", "start", "--type", "process")
    told = {
        **prefect_environment(home, api_url),
        **EVERY_WORKER,
        "PREFECT_LOGGING_TO_API_BATCH_INTERVAL": "0.5",  # `rlhf run` follows the log live
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PREFECT_WORKER_HEARTBEAT_SECONDS": str(_HEARTBEAT_S),
        "PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED": "false",
        "PYTHONUNBUFFERED": "1",
        "RLHF_FLOWS_SOCKET": str(socket_dir / "flows"),
        **environment,
    }
    return Service(
        name="worker",
        title="the worker",
        command=(*command, "--pool", WORK_POOL, "--name", WORKER_NAME, "--install-policy", "never"),
        environment=told,
        cwd=home,
        log=home / "logs" / "worker.log",
        address=f"work pool {WORK_POOL}",
        probe=lambda process: missing(api_url, process),
        start_timeout_s=120.0,
        settle_timeout_s=10.0,
        packages=("prefect", "rlhf-flows"),  # ours is its plugin
    )


def missing(api_url: str, process: psutil.Process) -> str | None:
    """Return None when this very process has lately told the server that it lives."""
    try:
        path = f"/work_pools/{WORK_POOL}/workers/filter"
        workers = prefect_api.call(api_url, "POST", path, {}, timeout_s=_ANSWER_S) or []
        beats = [each["last_heartbeat_time"] for each in workers if each["name"] == WORKER_NAME]
        latest = max((datetime.fromisoformat(beat).timestamp() for beat in beats if beat), default=0.0)
        if latest > max(process.create_time(), time.time() - _STALE_S):
            return None
    except (ServiceError, psutil.Error):
        pass
    return "did not report to the server"

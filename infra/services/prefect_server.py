"""The local Prefect server, and the environment in which everything of Prefect runs here."""

from __future__ import annotations

import sys
from pathlib import Path

from infra.services import prefect_api
from infra.services.service import Service

PREFECT_PORT = 4200
"""Where people expect it."""


def prefect_environment(home: Path, api_url: str) -> dict[str, str]:
    """Return what Prefect's programs of this stack are told: server, worker, deployments, flow runs."""
    return {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_API_URL": api_url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_LOGGING_COLORS": "false",  # they would be escape codes in files
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",  # a run must never end up on a server that nobody sees
    }


def prefect_server(home: Path, port: int, database_url: str | None) -> Service:
    """Return the Prefect server as a service.

    Args:
        home: its database and log lie under it.
        port: where it listens, on the loopback address.
        database_url: None for sqlite in the home directory.
    """
    address = f"http://127.0.0.1:{port}"
    environment = {
        **prefect_environment(home, f"{address}/api"),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": database_url or f"sqlite+aiosqlite:///{home}/prefect/prefect.db",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        # Runs of schedules are made ahead, and none for a time that has passed: so many nights may a stack be down.
        "PREFECT_SERVER_SERVICES_SCHEDULER_MIN_RUNS": "31",
    }
    return Service(
        name="server",
        title="the Prefect server",
        command=(sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)),
        environment=environment,
        cwd=home,  # not the checkout: Prefect reads the `.env` of its directory
        log=home / "logs" / "server.log",
        address=address,
        probe=lambda _: None if prefect_api.is_healthy(f"{address}/api") else "did not answer",
        start_timeout_s=180.0,
        settle_timeout_s=10.0,
    )

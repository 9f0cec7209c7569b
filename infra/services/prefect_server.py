"""The local Prefect server, and the environment in which everything of Prefect runs here."""

from __future__ import annotations

import sys
from pathlib import Path

from infra.services import prefect_api
from infra.services.service import Service, answers_itself
from infra.settings import env_file, inherited_environment, read_env_file

PREFECT_PORT = 4200
"""Where people expect it."""
SQLITE_FILE = Path("prefect", "prefect.db")
"""Its database in the home directory, where it has no other."""
DECIDED = (
    # Where it is: RLHF_PREFECT_PORT, on the loopback address.
    *("PREFECT_SERVER_API_HOST", "PREFECT_SERVER_API_PORT", "PREFECT_SERVER_API_BASE_PATH"),
    # Who may call it: the password is passed on, once it has been looked at.
    *("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_SERVER_API_CORS_", "PREFECT_SERVER_CORS_"),
    *("PREFECT_SERVER_API_CSRF_", "PREFECT_SERVER_CSRF_"),
    # Where its data are: RLHF_DATABASE, RLHF_DATABASE_URL.
    *("PREFECT_SERVER_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_DRIVER", "PREFECT_SERVER_DATABASE_HOST"),
    *("PREFECT_SERVER_DATABASE_NAME", "PREFECT_SERVER_DATABASE_PASSWORD", "PREFECT_SERVER_DATABASE_PORT"),
    *("PREFECT_SERVER_DATABASE_USER",),
    # What our own calls rely on.
    *("PREFECT_SERVER_API_DEFAULT_LIMIT", "PREFECT_SERVER_DEFAULT_LIMIT"),
    # What it tells others, and that there is only one.
    *("PREFECT_SERVER_ANALYTICS_ENABLED", "PREFECT_SERVER_EPHEMERAL_"),
)
"""Settings of the server that `rlhf up` makes by itself; the user's others (PREFECT_SERVER_...) are passed on."""
UNHURRIED = {
    f"PREFECT_SERVER_SERVICES_{name}_LOOP_SECONDS": "60"
    for name in [
        "CANCELLATION_CLEANUP",
        "CLEANUP_RECONCILER",
        "FOREMAN",
        "LATE_RUNS",
        "PAUSE_EXPIRATIONS",
        "REPOSSESSOR",
    ]
}
"""What the server looks for by itself, and nobody waits for: each look costs it work, day and night. It looks for runs
that fell silent as often as ever: restarts depend on that."""


def prefect_environment(home: Path, api_url: str) -> dict[str, str]:
    """Return the settings of Prefect's programs in this stack: server, worker, deployments, flow runs."""
    return {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_API_URL": api_url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_LOGGING_COLORS": "false",  # they would be escape codes in files
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",  # a run must never go to a server that nobody sees
    }


def _users_own() -> dict[str, str]:
    """Return the user's settings of the Prefect server, from the environment or `.env`, without what the stack sets."""
    said = {**read_env_file(env_file()), **inherited_environment()}
    return {
        name.upper(): value
        for name, value in said.items()
        if name.upper().startswith("PREFECT_SERVER_") and not name.upper().startswith(DECIDED)
    }


def prefect_server(home: Path, port: int, database_url: str | None, password: str, runs_kept_days: float) -> Service:
    """Return the Prefect server as a service.

    Args:
        home: its database and log lie under it.
        port: where it listens, on the loopback address.
        database_url: None for sqlite in the home directory.
        password: user:password, which it asks everybody for.
        runs_kept_days: how long it keeps a run that has ended.
    """
    address = f"http://127.0.0.1:{port}"
    environment = {
        # The server deletes old runs with their logs and pages by itself; it already does so with events, after a week.
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": f"{runs_kept_days * 24 * 3600:.0f}",
        "COLUMNS": "400",  # `rlhf up` shows the last line of its log, and Prefect would break an error after 80 letters
        **UNHURRIED,
        **_users_own(),
        **prefect_environment(home, f"{address}/api"),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": database_url or f"sqlite+aiosqlite:///{home / SQLITE_FILE}",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING": "infra.event_ordering",  # automations that survive the server
        # Runs of schedules are made ahead, and none for a time that has passed: a stack may be down for so many nights.
        "PREFECT_SERVER_SERVICES_SCHEDULER_MIN_RUNS": "31",
        "PREFECT_SERVER_API_AUTH_STRING": password,
        # Pages from elsewhere may not call it, nor may one by the name of localhost: that may be another user's.
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": address,
        # No browser sends the password by itself, as it would send a cookie; and our own calls have no CSRF token.
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "false",
    }
    return Service(
        name="server",
        title="the Prefect server",
        command=(sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)),
        environment=environment,
        cwd=home,  # not the checkout: Prefect reads the `.env` of its directory
        log=home / "logs" / "server.log",
        address=address,
        probe=lambda process: answers_itself(process, port, healthy=prefect_api.is_healthy(f"{address}/api")),
        start_timeout_s=180.0,
        settle_timeout_s=15.0,
        packages=("prefect", "rlhf-flows"),  # ours orders its events
    )

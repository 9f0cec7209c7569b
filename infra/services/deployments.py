"""Deployments: registered with the server when anything that they are made from has changed."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from infra.errors import ServiceError
from infra.services import prefect_api
from infra.services.prefect_yaml import FILE_NAME, DeploymentEntry
from infra.services.service import last_words

_TIMEOUT_S = 180
_WAITING = "AwaitingConcurrencySlot"
_SOURCES = ("flows/*.py", "flows/presets/*.yaml", "rlhf_core/config/*.py")


def source_digest(checkout: Path) -> str:
    """Return a digest of all that deployments are made from: the file, presets, flows and the config's schema."""
    paths = [checkout / FILE_NAME, *(path for pattern in _SOURCES for path in sorted(checkout.glob(pattern)))]
    digest = hashlib.sha256(f"{checkout} {version('prefect')}".encode())
    for path in paths:
        digest.update(f"\n{path.relative_to(checkout)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def all_present(api_url: str, names: Iterable[str]) -> bool:
    """Whether the server has all these deployments (`flow/deployment`)."""
    return all(prefect_api.deployment(api_url, name) is not None for name in names)


def deploy(
    checkout: Path,
    api_url: str,
    environment: Mapping[str, str],
    log: Path,
    entries: Mapping[str, DeploymentEntry],
    said_before: Mapping[str, bool],
) -> dict[str, bool]:
    """Register all deployments of a checkout, and return what the file says of each schedule's being active.

    A schedule that a person has switched on or off since stays so, unless the file has changed. Runs that wait to begin
    stay too, also those of nights that were due while no worker ran.

    Args:
        checkout: where `prefect.yaml` lies.
        api_url: the Prefect server's.
        environment: of Prefect's command.
        log: where its output goes.
        entries: the file's deployments.
        said_before: what this function returned the last time.

    Raises:
        ServiceError: if Prefect refused one.
    """
    says = {f"{name}/{each.slug}": each.active for name, entry in entries.items() for each in entry.schedules}
    before = {
        name: _schedules(prefect_api.deployment(api_url, name)) for name, entry in entries.items() if entry.schedules
    }
    for name in entries:
        _keep_waiting_runs(api_url, name)
    _run_prefect_deploy(checkout, environment, log)
    for name, schedules in before.items():
        deployment = prefect_api.deployment(api_url, name)
        if deployment is None:
            raise ServiceError(f"`prefect deploy --all` succeeded, but there is no deployment {name}")
        for slug, schedule in _schedules(deployment).items():
            key, old = f"{name}/{slug}", schedules.get(slug, schedule)
            if old["active"] != schedule["active"] and says.get(key) == said_before.get(key):
                path = f"/deployments/{deployment['id']}/schedules/{schedule['id']}"
                prefect_api.call(api_url, "PATCH", path, {"active": old["active"]})
    return says


def _keep_waiting_runs(api_url: str, name: str) -> None:
    """Keep a new registration from deleting the deployment's runs that have not begun, except those of nights to come.

    Prefect deletes every one that is Scheduled, unless it waits for a slot: the state that they are given here. A
    worker takes them from it as from any other. Nights to come are scheduled again, as the file says now.
    """
    where = {
        "deployments": {"name": {"any_": [name.partition("/")[2]]}},
        "flows": {"name": {"any_": [name.partition("/")[0]]}},
        "flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}},
    }
    now = datetime.now(UTC)
    for run in prefect_api.flow_runs(api_url, where):
        due = datetime.fromisoformat(run["next_scheduled_start_time"] or run["expected_start_time"])
        if run["run_count"] == 0 and not (run["auto_scheduled"] and due > now):
            state = {
                "type": "SCHEDULED",
                "name": _WAITING,
                "message": "Due, and waiting for a worker, while its deployment was registered anew.",
                "state_details": {"scheduled_time": due.isoformat()},
            }
            prefect_api.call(api_url, "POST", f"/flow_runs/{run['id']}/set_state", {"state": state})


def _run_prefect_deploy(checkout: Path, environment: Mapping[str, str], log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", FILE_NAME]
    with log.open("wb") as output:
        try:
            status = subprocess.run(
                command,
                cwd=checkout,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            raise ServiceError(f"`prefect deploy --all` did not end within {_TIMEOUT_S} s: {last_words(log)}") from None
    if status != 0:
        raise ServiceError(f"`prefect deploy --all` refused: {last_words(log)}")


def _schedules(deployment: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    return {each["slug"]: each for each in (deployment or {}).get("schedules", []) if each.get("slug")}

"""Flow runs on this machine: their processes, and the states of those whose processes are gone."""

from __future__ import annotations

from typing import Any

import psutil

from infra.process_record import is_live
from infra.services import prefect_api, processes
from infra.services.worker import WORK_POOL

_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
_ENGINE = "prefect.engine"


def engines(stack_id: str) -> list[psutil.Process]:
    """Return the processes that run a flow for this stack's worker."""
    return [process for process in processes.marked(stack_id) if _runs_a_flow(process)]


def settle_lost_runs(api_url: str) -> list[str]:
    """Put into a final state all runs of our pool that count as running and have no process; return their names.

    A worker that is told to end takes its runs' processes along without a word to the server, which would show
    them as running for ever. To be called while no worker runs: one may just have taken a run, without a process yet.

    Raises:
        ServiceError: if the server does not answer.
    """
    alive = _runs_with_a_process()
    settled = []
    for run in _unfinished(api_url, {"work_pools": {"name": {"any_": [WORK_POOL]}}}):
        if run["id"] not in alive:
            _settle(api_url, run)
            settled.append(str(run["name"]))
    return settled


def _settle(api_url: str, run: dict[str, Any]) -> None:
    for child in _unfinished(api_url, {"flow_runs": {"parent_flow_run_id": {"any_": [run["id"]]}}}):
        _settle(api_url, child)
    name = "CANCELLED" if run["state_type"] == "CANCELLING" else "CRASHED"
    state = {"type": name, "message": "The process of this run ended with the local stack or its worker."}
    prefect_api.call(api_url, "POST", f"/flow_runs/{run['id']}/set_state", {"state": state, "force": True})


def _unfinished(api_url: str, where: dict[str, Any]) -> list[dict[str, Any]]:
    states = {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}
    filters = {**where, "flow_runs": {**where.get("flow_runs", {}), "state": states}}
    found: list[dict[str, Any]] = prefect_api.call(api_url, "POST", "/flow_runs/filter", filters)
    return found


def _runs_with_a_process() -> set[str]:
    """Return the runs of the processes in which Prefect works; a run's own children may outlive it."""
    found = set()
    for process in psutil.process_iter():
        try:
            if _has_prefect_module(process) and (run := process.environ().get(_RUN_VARIABLE)):
                found.add(run)
        except (psutil.Error, OSError):  # gone, or another user's
            continue
    return found


def _has_prefect_module(process: psutil.Process) -> bool:
    return is_live(process) and any(part.startswith("prefect.") for part in process.cmdline())


def _runs_a_flow(process: psutil.Process) -> bool:
    try:
        return _ENGINE in process.cmdline()
    except psutil.Error:
        return False

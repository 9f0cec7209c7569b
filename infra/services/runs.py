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


def settle_lost_runs(api_url: str, *, for_good: bool) -> list[str]:
    """Settle all runs of our pool that were taken by a worker and have no process; return a sentence for each.

    A worker that is told to end also ends the processes of its runs, and does not tell the server, which would show
    them as running for ever. A worker that is killed leaves runs that it had taken and not begun: nothing of them is
    lost, and they are due again. Call this only while no worker runs: a worker may just have taken a run that has no
    process yet.

    Args:
        api_url: the Prefect server's.
        for_good: whether a person ends them: runs that had begun are not started again.

    Raises:
        ServiceError: if the server does not answer.
    """
    alive = _runs_with_a_process()
    lost = _unfinished(api_url, {"work_pools": {"name": {"any_": [WORK_POOL]}}})
    return [
        _settle(api_url, run, due_again=run["state_type"] == "PENDING" and not (for_good and run["run_count"]))
        for run in lost
        if run["id"] not in alive
    ]


def _settle(api_url: str, run: dict[str, Any], *, due_again: bool) -> str:
    for child in _unfinished(api_url, {"flow_runs": {"parent_flow_run_id": {"any_": [run["id"]]}}}):
        _settle(api_url, child, due_again=False)
    if due_again:
        kind = "SCHEDULED"
        message = "The worker that had taken this run ended before the run had a process: it is due again."
        told = f"run {run['name']} had been taken by a worker, and had no process yet: it is due again"
    else:
        kind = "CANCELLED" if run["state_type"] == "CANCELLING" else "CRASHED"
        message = "The process of this run ended with the local stack or its worker."
        told = f"run {run['name']} had lost its process: it now counts as {kind.lower()}"
    state = {"type": kind, "message": message}
    prefect_api.call(api_url, "POST", f"/flow_runs/{run['id']}/set_state", {"state": state, "force": True})
    return told


def _unfinished(api_url: str, where: dict[str, Any]) -> list[dict[str, Any]]:
    states = {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}
    return prefect_api.flow_runs(api_url, {**where, "flow_runs": {**where.get("flow_runs", {}), "state": states}})


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

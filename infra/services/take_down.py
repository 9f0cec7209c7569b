"""`rlhf down`: end everything of the stack, its flow runs included, and see that nothing is left."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil

from infra.errors import ServiceError
from infra.process_record import describe, is_live
from infra.services import automations, postgres, processes, runs, seaweed
from infra.services.service import Report
from infra.services.state import StackState, locked
from infra.settings import Settings

_RUNS_GRACE_S = 40.0
"""For a flow to end its Ray cluster and to tell the server."""
_CLUSTERS_GRACE_S = 10.0
"""For the watchdogs of clusters whose flow was killed."""
_SERVICES_GRACE_S = 15.0
_SUPERVISOR_GRACE_S = 90.0
"""For a supervisor to end what it is just starting."""


def down(settings: Settings, report: Report) -> int:
    """End all processes of the stack and return how many services ran; data and ports are kept.

    Args:
        settings: as `infra.settings.settings` returns them.
        report: takes a line for each thing that is done.

    Raises:
        ServiceError: if processes are left.
    """
    if not settings.home.is_dir():
        return 0
    _end_supervision(StackState.load(settings.home), report)
    with locked(settings.home, report):
        state = StackState.load(settings.home)
        state.supervisor = None
        state.save(settings.home)
        live = {name: process for name, record in state.services.items() if (process := record.process())}
        removed: dict[str, Any] = {}
        if "server" in live:
            with suppress(ServiceError):  # a run that is ended here would be started again; `up` installs them again
                api_url = f"{state.services['server'].address}/api"
                removed = automations.enabled(api_url)
                automations.remove(api_url)
        _end_runs(state, live, removed, report)
        for name, process in live.items():
            if is_live(process):
                report(f"ending the {name}")
        others = [process for name, process in live.items() if name != postgres.NAME]
        _end([each for process in others for each in processes.tree(process)], _SERVICES_GRACE_S)
        if database := live.get(postgres.NAME):  # once nobody writes to it
            postgres.end(database)
        postgres.end_orphans(settings.home)
        _end(processes.marked(state.id), grace_s=5.0)
        if left := processes.marked(state.id):  # started while the others were ended
            _end(left, grace_s=0.0)
        state.services = {}
        remove_sockets(state)
        state.save(settings.home)
        return len(live)


def _end_supervision(state: StackState, report: Report) -> None:
    """Have the supervisor end now, and what it is just starting: else it would notice within seconds."""
    if state.supervisor and (process := state.supervisor.process()):
        report("ending supervision")
        processes.end([process], grace_s=_SUPERVISOR_GRACE_S)


def remove_sockets(state: StackState) -> None:
    """Remove what a stack without services has left in the system's temp folder."""
    seaweed.remove_sockets(state.ports)
    if state.socket_dir is not None:
        shutil.rmtree(state.socket_dir, ignore_errors=True)
    state.socket_dir = None


def _end_runs(state: StackState, live: dict[str, psutil.Process], removed: dict[str, Any], report: Report) -> None:
    """End flow runs before the worker, and the worker before the server, so that the server hears how they ended.

    Args:
        state: of the stack.
        live: its services.
        removed: the automations that would have started crashed runs again.
        report: takes a line for each thing that is done.
    """
    ended_since = time.time()
    if flows := runs.engines(state.id):
        report(f"ending {len(flows)} flow run{'s' if len(flows) > 1 else ''}")
        processes.end(flows, grace_s=_RUNS_GRACE_S)
    if worker := live.get("worker"):
        report("ending the worker")
        _end(processes.tree(worker), _SERVICES_GRACE_S)
    _await_clusters(state, list(live.values()), report)
    if "server" in live:
        api_url = f"{state.services['server'].address}/api"
        # a broken server must not keep us from ending it
        with suppress(ServiceError):
            automations.give_up(api_url, removed, ended_since=ended_since)
        with suppress(ServiceError):
            for settled in runs.settle_lost_runs(api_url, for_good=True):
                report(settled)


def _await_clusters(state: StackState, services: Sequence[psutil.Process], report: Report) -> None:
    """Let the watchdogs of Ray clusters do their work; what remains is ended like everything else."""
    deadline = time.monotonic() + _CLUSTERS_GRACE_S
    said = False
    while time.monotonic() < deadline:
        known = {each.pid for service in services for each in processes.tree(service)}
        if not [process for process in processes.marked(state.id) if process.pid not in known]:
            return
        if not said:
            report("waiting for Ray clusters to end")
            said = True
        time.sleep(0.2)


def _end(doomed: Sequence[psutil.Process], grace_s: float) -> None:
    if left := processes.end(doomed, grace_s=grace_s):
        names = ", ".join(describe(process) for process in left)
        raise ServiceError(
            f"these processes of the stack are left, in spite of SIGKILL: {names}; they probably wait for a device "
            "or a file system: run `rlhf down` again"
        )

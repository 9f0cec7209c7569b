"""`rlhf status`: what runs, where, and how much memory it takes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil

from infra.forked_flows import is_flow_server
from infra.prefect_access import PASSWORD_FILE
from infra.services import postgres, prefect_api, processes
from infra.services.deployments import differences
from infra.services.prefect_yaml import read_prefect_yaml
from infra.services.seaweed import is_healthy as store_is_healthy
from infra.services.state import StackState
from infra.services.worker import missing as missing_worker
from infra.settings import CHECKOUT, Settings

SERVICES = ("store", postgres.NAME, "server", "worker")


class ServiceStatus(NamedTuple):
    """One line of the table."""

    name: str
    state: str
    """`running`, `not answering`, `died` or `stopped`; `none` where nothing has to run."""
    address: str
    pid: int | None
    memory_bytes: int
    """Proportional set size, so that the lines add up to what the stack takes."""
    log: Path | None


def status(settings: Settings) -> list[ServiceStatus]:
    """Return a line for each service, for its supervisor, and for the processes of flow runs and their Ray clusters.

    Raises:
        ServiceError: if the stack's state file is damaged.
    """
    state = StackState.load(settings.home) if settings.home.is_dir() else StackState()
    lines = []
    counted: set[int] = set()
    for name in SERVICES:
        line, members = _service(name, state)
        wanted = {"store": settings.wants_local_store, postgres.NAME: settings.wants_local_postgres}
        if line.pid is not None or wanted.get(name, True):
            lines.append(line)
        counted |= {process.pid for process in members}
    supervisor = state.supervisor.process() if state.supervisor else None
    counted |= {supervisor.pid} if supervisor else set()
    lines.append(_supervisor(supervisor))
    others = [process for process in processes.marked(state.id) if process.pid not in counted]
    word = "running" if others else "none"
    lines.append(ServiceStatus("runs", word, f"processes: {len(others)}", None, processes.memory_bytes(others), None))
    return lines


def running_api_url(settings: Settings) -> str | None:
    """Return the address of the local stack's Prefect server while its process runs, else None.

    Raises:
        ServiceError: if the stack's state file is damaged.
    """
    state = StackState.load(settings.home) if settings.home.is_dir() else StackState()
    server = state.services.get("server")
    return f"{server.address}/api" if server and server.process() else None


def set_in_prefect(settings: Settings, checkout: Path = CHECKOUT) -> dict[str, list[str]]:
    """Return what a person has set otherwise than `prefect.yaml` has it, a phrase for each, by deployment.

    Raises:
        ServiceError: if the server does not answer, or the file is not as it must be.
    """
    api_url = running_api_url(settings)
    return {} if api_url is None else differences(api_url, read_prefect_yaml(checkout))


def how_to_open_the_ui(settings: Settings, address: str) -> str:
    """Return where the Prefect UI is, and where its password is kept.

    Args:
        settings: of the stack.
        address: the server's.
    """
    return f"Prefect UI: {address} (it asks for a password: the line in {settings.home / PASSWORD_FILE})"


def _supervisor(process: psutil.Process | None) -> ServiceStatus:
    """Return its line; a stack that nobody supervises lacks nothing."""
    if process is None:
        return ServiceStatus("supervisor", "none", "", None, 0, None)
    return ServiceStatus("supervisor", "running", "", process.pid, processes.memory_bytes([process]), None)


def _service(name: str, state: StackState) -> tuple[ServiceStatus, list[psutil.Process]]:
    record = state.services.get(name)
    if record is None:
        return ServiceStatus(name, "stopped", "", None, 0, None), []
    process = record.process()
    if process is None:
        return ServiceStatus(name, "died", record.address, None, 0, record.log), []
    members = processes.tree(process)
    if name == "worker":  # flow runs, which descend from it, have their own line
        members = [process, *(each for each in members if is_flow_server(each))]
    word = "running" if is_well(name, state, process) else "not answering"
    line = ServiceStatus(name, word, record.address, process.pid, processes.memory_bytes(members), record.log)
    return line, members


def is_well(name: str, state: StackState, process: psutil.Process) -> bool:
    """Whether a service answers; the worker does so through the server.

    Args:
        name: of the service.
        state: of the stack.
        process: the service's.
    """
    if name == "store":
        return store_is_healthy(state.services[name].address)
    if name == postgres.NAME:
        return postgres.answers(state.services[name].address)
    server = state.services.get("server")
    if server is None or server.process() is None:  # what listens at its port now must get no credentials
        return False
    database = state.services.get(postgres.NAME)
    if database is not None and database.process() is None:  # the server says that it lives, and no more
        return False
    api_url = f"{server.address}/api"
    return prefect_api.is_healthy(api_url) if name == "server" else missing_worker(api_url, process) is None

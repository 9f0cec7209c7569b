"""A worker's flows are forked from a process that has imported them: what a run would spend its first seconds on.

Prefect has one process prepare another, and each imports Prefect; then a flow imports what it computes with. Here a
server (`infra.forked_processes`) is started beside the worker, with its environment, and ends with it. A run's process
is forked there if its deployment is of this checkout, whose code the server has imported, and neither its job variables
nor its work pool give it a command or an environment: Prefect reads its settings when it is imported. Every other run
starts as Prefect starts it; so does one that finds the server gone, or importing anew because a file was changed.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psutil

from infra.forked_processes import forking_python, server_command, server_environment
from infra.settings import CHECKOUT

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun
    from prefect.client.schemas.responses import DeploymentResponse
    from prefect.workers.process import ProcessJobConfiguration

IMPORTED = "flows.imports"
_NO_RUN = "00000000-0000-0000-0000-000000000000"
"""With the id of a run Prefect's plugin makes the server's process one of a flow, not a worker's."""


def fork_flows(address: Path) -> None:
    """Have this worker's flows forked.

    Args:
        address: of the server's socket, in a directory that is closed to others.
    """
    from prefect import Flow  # noqa: PLC0415 - half of Prefect, for workers alone
    from prefect.workers import process as of_prefect  # noqa: PLC0415 - as above

    process: Any = of_prefect
    usual, load_flow = process.ProcessJobConfiguration.prepare_for_flow_run, process.load_flow_from_flow_run
    server, ours, without_hooks = _start(address), set[UUID | None](), Flow(lambda: None, name="without hooks")

    def prepare(
        self: ProcessJobConfiguration, flow_run: FlowRun, deployment: DeploymentResponse | None = None, **given: Any
    ) -> None:
        nonlocal server
        if self.command is None and not self.env and deployment is not None and _is_ours(deployment):
            ours.add(deployment.id)
            if server.poll() is not None and address.exists():  # it had come up
                server = _start(address)
            self.command = f"{forking_python(address)} -mprefect.engine"
        usual(self, flow_run, deployment, **given)

    async def load(flow_run: FlowRun, *args: Any, **given: Any) -> Flow[Any, Any]:
        """A crashed run's flow is loaded into the worker, where a command was given, for its hooks; ours have none."""
        return without_hooks if flow_run.deployment_id in ours else await load_flow(flow_run, *args, **given)

    process.ProcessJobConfiguration.prepare_for_flow_run = prepare
    process.load_flow_from_flow_run = load


def is_flow_server(process: psutil.Process) -> bool:
    """Return whether flows are forked from this process, or it watches one of them."""
    try:
        return IMPORTED in process.cmdline()  # a flow has written its own command over it
    except psutil.Error:
        return False


def _start(address: Path) -> subprocess.Popen[bytes]:
    from prefect.settings import get_current_settings  # noqa: PLC0415 - as above

    told = get_current_settings().to_environment_variables(exclude_unset=True)
    return subprocess.Popen(
        server_command(address, [IMPORTED]),
        env=server_environment({**os.environ, **told, "PREFECT__FLOW_RUN_ID": _NO_RUN}),
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # what interrupts the worker is not for it
    )


def _is_ours(deployment: DeploymentResponse) -> bool:
    """Whether a deployment runs flows of this checkout as they lie there."""
    file = CHECKOUT / (deployment.entrypoint or "").partition(":")[0]
    here = [{"prefect.deployments.steps.set_working_directory": {"directory": str(CHECKOUT)}}]
    return deployment.pull_steps == here and file.parent == CHECKOUT / "flows"

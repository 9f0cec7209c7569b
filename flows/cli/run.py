"""`rlhf run`: start a deployment's run, follow it live, show its report."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from uuid import UUID

    from rich.console import Console


Given = Annotated[tuple[str, ...], Parameter(name=("--param", "-p"), negative="")]


def run(preset: str = "quickstart", /, *, param: Given = ()) -> int:
    """Run the deployment pipeline/PRESET, follow it, and show its report.

    The exit status is 0 when all of it ran, whatever the gate decided, and 1 when anything failed.

    Args:
        preset: name of the deployment of the flow `pipeline`; FLOW/NAME takes any other.
        param: a parameter of the flow as NAME=VALUE (VALUE as JSON, or else as text); may be repeated.
    """
    import asyncio

    from rich.console import Console

    # Width is given where there is no terminal, so that a log file is not broken at 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 140)
    deployment = preset if "/" in preset else f"pipeline/{preset}"
    return asyncio.run(_run(deployment, _parameters(param), console))


async def _run(deployment: str, parameters: dict[str, Any], console: Console) -> int:
    from prefect.client.orchestration import PrefectClient

    from infra.errors import ServiceError
    from infra.settings import settings

    api_url = settings().prefect_api_url
    if api_url is None:
        raise ServiceError("no Prefect server is known here; start one with `rlhf up`, or set PREFECT_API_URL")
    async with PrefectClient(api_url) as client:
        found = await _deployment(client, deployment)
        flow_run = await client.create_flow_run_from_deployment(found.id, parameters=parameters)
        page = api_url.removesuffix("/").removesuffix("/api")
        console.print(f"{deployment}: run {flow_run.name}, {page}/runs/flow-run/{flow_run.id}")
        try:
            state = await _follow(client, flow_run.id, console)
        except (KeyboardInterrupt, asyncio_cancelled()):
            console.print(
                f"\nThe run goes on without this terminal; end it with: prefect flow-run cancel {flow_run.id}"
            )
            return 130
    if not state.is_completed():
        console.print(f"[bold red]{state.name}[/]: {state.message}", highlight=False)
        return 1
    _show_report(flow_run.id, console)
    return 0


def asyncio_cancelled() -> type[BaseException]:
    """Return what Ctrl-C becomes inside a running event loop."""
    import asyncio

    return asyncio.CancelledError


async def _deployment(client: Any, name: str) -> Any:
    from difflib import get_close_matches

    from prefect.exceptions import ObjectNotFound

    from rlhf_core.errors import ConfigError

    try:
        return await client.read_deployment_by_name(name)
    except ObjectNotFound as error:
        flows = {flow.id: flow.name for flow in await client.read_flows()}
        known = [f"{flows[each.flow_id]}/{each.name}" for each in await client.read_deployments()]
        near = get_close_matches(name, known, n=3) or sorted(known)
        raise ConfigError(f"there is no deployment {name!r}; did you mean {' or '.join(near)}?") from error


async def _follow(client: Any, flow_run_id: UUID, console: Console) -> Any:
    """Print the run's marked lines as they come, until it is in a final state; return that state."""
    import asyncio

    said: set[UUID] = set()
    waiting_for_worker = True
    while True:
        flow_run = await client.read_flow_run(flow_run_id)
        if waiting_for_worker and flow_run.state is not None and flow_run.state.is_running():
            waiting_for_worker = False
            console.print("running", style="dim")
        final = flow_run.state is not None and flow_run.state.is_final()
        if final:
            await asyncio.sleep(1.0)  # the last lines are sent in batches of half a second
        await _print_new_lines(client, flow_run_id, said, console)
        if final:
            return flow_run.state
        await asyncio.sleep(0.5)


async def _print_new_lines(client: Any, flow_run_id: UUID, said: set[UUID], console: Console) -> None:
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
    from prefect.client.schemas.sorting import LogSort

    from tasks.progress import PREFIX

    runs = await _family(client, flow_run_id)
    logs = await client.read_logs(
        LogFilter(flow_run_id=LogFilterFlowRunId(any_=runs)), limit=200, sort=LogSort.TIMESTAMP_DESC
    )
    for log in sorted(logs, key=lambda each: each.timestamp):
        if log.id in said:
            continue
        said.add(log.id)
        if log.message.startswith(PREFIX):
            console.print(f"[dim]{log.timestamp.astimezone():%H:%M:%S}[/] {log.message}", highlight=False)


async def _family(client: Any, flow_run_id: UUID) -> list[UUID]:
    """Return the run and its subflows' runs."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId

    parent = FlowRunFilterParentFlowRunId(any_=[flow_run_id])
    children = await client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=parent))
    return [flow_run_id, *(child.id for child in children)]


def _show_report(flow_run_id: UUID, console: Console) -> None:
    from rich.markdown import Markdown

    from infra.artifacts import open_default_store

    store = open_default_store()
    manifest = store.find("run", str(flow_run_id))
    if manifest is None:  # a single stage has no report of its own
        console.print("finished")
        return
    console.print(Markdown(store.read_bytes(manifest, "report.md").decode()))
    console.print(f"[dim]stored as {manifest.ref.uri}; rlhf artifacts lineage {manifest.ref.uri}[/]")


def _parameters(pairs: tuple[str, ...]) -> dict[str, Any]:
    import json

    from rlhf_core.errors import ConfigError

    parameters: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"a parameter is written NAME=VALUE, but {pair!r} came")
        try:
            parameters[name] = json.loads(text)
        except json.JSONDecodeError:
            parameters[name] = text
    return parameters

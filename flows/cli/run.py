"""`rlhf run`: start a deployment's run, follow it live, show its report."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from uuid import UUID

    from httpx import Request
    from prefect.client.orchestration import PrefectClient
    from rich.console import Console

    from infra.prefect_access import Access

_LONGEST_DETAIL = 600
Given = Annotated[tuple[str, ...], Parameter(name=("--param", "-p"), negative="")]


def run(preset: str = "quickstart", /, *, param: Given = ()) -> int:
    """Run the deployment pipeline/PRESET, follow it, and show its report.

    The exit status is 0 when all of it ran, whatever the gate decided, and 1 when anything failed.
    While the local stack runs, the run goes to its server, even if PREFECT_API_URL is exported as another one:
    what `rlhf up` has started, `rlhf run` uses. Without it, the run goes to PREFECT_API_URL.

    Args:
        preset: name of the deployment of the flow `pipeline`; FLOW/NAME takes any other.
        param: a parameter of the flow as NAME=VALUE (VALUE as JSON, or else as text); may be repeated. A path of data
            or of a model is seen from the current folder.
    """
    import asyncio

    import prefect  # noqa: F401  # before the event loop, in which it cannot start its plugins
    from httpx import HTTPError, HTTPStatusError, InvalidURL, codes
    from rich.console import Console

    from flows.cli.parameters import read_parameters
    from infra.errors import ServiceError
    from infra.prefect_access import access_to, refusal

    # Width is given where there is no terminal, so that a log file is not broken at 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    deployment = preset if "/" in preset else f"pipeline/{preset}"
    parameters = read_parameters(param)
    api_url, here = _api_url(console)
    access = access_to(api_url)
    try:
        return asyncio.run(_run(deployment, parameters, api_url, access, console, here=here))
    except HTTPStatusError as error:
        if error.response.status_code == codes.UNAUTHORIZED:
            raise ServiceError(refusal(api_url, access)) from error
        raise ServiceError(f"the Prefect server at {api_url} refuses: {_detail(error)}") from error
    except (HTTPError, InvalidURL) as error:
        why = str(error) or type(error).__name__
        raise ServiceError(
            f"the Prefect server at {api_url} does not answer ({why}); run `rlhf up`, or correct PREFECT_API_URL"
        ) from error


def _api_url(console: Console) -> tuple[str, bool]:
    """Return the server to run on, and whether it is this installation's own, which is taken while it runs.

    Raises:
        ServiceError: if there is none.
    """
    from infra import services
    from infra.errors import ServiceError
    from infra.settings import settings

    known = settings()
    ours, told = services.running_api_url(known), known.prefect_api_url
    if ours is None and told is None:
        raise ServiceError("no Prefect server is known here; start one with `rlhf up`, or set PREFECT_API_URL")
    if ours and told and told.rstrip("/") != ours:
        console.print(
            f"PREFECT_API_URL is {told}, but the local stack runs: the run goes to {ours} "
            "(`rlhf down` first, to run elsewhere)",
            style="yellow",
            markup=False,
        )
    return ours or str(told), ours is not None


async def _run(
    deployment: str, parameters: dict[str, Any], api_url: str, access: Access, console: Console, *, here: bool
) -> int:
    from rich.text import Text

    from flows.cli.following import Follower
    from tasks.progress import PREFIX

    async with _client(api_url, access) as client:
        found = await _deployment(client, deployment)
        flow_run = await _start(client, found, deployment, parameters, here=here)
        page = api_url.removesuffix("/").removesuffix("/api")
        console.print(f"{deployment}: run {flow_run.name}, {page}/runs/flow-run/{flow_run.id}", markup=False)
        try:
            state = await Follower(client, flow_run, console, prefix=PREFIX).follow()
        except (KeyboardInterrupt, asyncio_cancelled()):
            console.print(
                f"\nThe run goes on without this terminal; end it with: prefect flow-run cancel {flow_run.id}"
            )
            return 130
    if not state.is_completed():
        console.print(Text.assemble((state.name, "bold red"), f": {state.message or 'without a word'}"))
        return 1
    _show_report(flow_run.id, console)
    told = f"finished: {state.message}" if state.message else "finished"
    console.print(told, markup=False, soft_wrap=True)  # references in it are copied
    return 0


def _client(api_url: str, access: Access) -> PrefectClient:
    """Return Prefect's client, telling this server who we are, whatever Prefect's settings say of another."""
    from prefect.client.orchestration import PrefectClient
    from prefect.settings import PREFECT_CLIENT_CUSTOM_HEADERS

    others = set(PREFECT_CLIENT_CUSTOM_HEADERS.value()) - set(access.headers)

    async def introduce(request: Request) -> None:
        for name in others:
            request.headers.pop(name, None)
        request.headers.update(access.all_headers)

    settings: dict[str, Any] = {"event_hooks": {"request": [introduce]}}
    if access.cert_file or access.skip_verify:
        settings["verify"] = access.tls()
    return PrefectClient(api_url, auth_string=access.auth_string, api_key=access.api_key, httpx_settings=settings)


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
        hint = f"did you mean {' or '.join(near)}?" if near else "the server has none: `rlhf up` registers them"
        raise ConfigError(f"there is no deployment {name!r}; {hint}") from error


async def _start(client: Any, found: Any, deployment: str, parameters: dict[str, Any], *, here: bool) -> Any:
    """Create the run.

    Raises:
        RlhfError: if the deployment does not take these parameters, or the run would refuse them at once.
    """
    from httpx import HTTPStatusError, codes

    from flows.cli.parameters import check_configuration, check_parameters, placed
    from rlhf_core.errors import ConfigError

    schema = found.parameter_openapi_schema or {}
    known = schema.get("properties", {})
    check_parameters(deployment, parameters, schema)
    if "preset" in known:  # a flow of ours
        parameters = placed(parameters, here=here)
        if here:
            check_configuration({"preset": known["preset"].get("default"), **found.parameters, **parameters})
    try:
        return await client.create_flow_run_from_deployment(found.id, parameters=parameters)
    except HTTPStatusError as error:
        if error.response.status_code not in {codes.CONFLICT, codes.UNPROCESSABLE_ENTITY}:
            raise
        raise ConfigError(
            f"{deployment} refuses: {_detail(error)} (its parameters are {', '.join(known) or 'none'})"
        ) from error


def _detail(error: Any) -> str:
    """Return what the server said of a refusal, in one line."""
    try:
        said = error.response.json()
    except ValueError:  # some other server
        said = error.response.text
    if isinstance(said, dict):
        said = said.get("detail") or said.get("exception_message") or said
    return " ".join(str(said).split())[:_LONGEST_DETAIL] or f"status {error.response.status_code}"


def _show_report(flow_run_id: UUID, console: Console) -> None:
    from rich.markdown import Markdown

    from infra.artifacts import open_default_store
    from tasks.report.markdown import PICTURE_LINE

    store = open_default_store()
    manifest = store.find("run", str(flow_run_id))
    if manifest is None:  # a single stage has no report of its own
        return
    report = store.read_bytes(manifest, "report.md").decode()
    console.print(Markdown(PICTURE_LINE.sub(r"*\1:* `\2`", report)))  # a terminal shows no pictures: it names them
    uri, pictures = manifest.ref.uri, [entry.path for entry in manifest.files if entry.path.endswith(".png")]
    console.print(f"stored as {uri}; rlhf artifacts lineage {uri}", style="dim", markup=False)
    console.print(
        f"pictures ({', '.join(pictures)}) and samples.md: rlhf artifacts fetch {uri} DIRECTORY",
        style="dim",
        markup=False,
    )

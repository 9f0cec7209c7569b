"""`rlhf run`: start a deployment's run, follow it live, show its report."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from flows.cli.output import console
from infra.errors import ServiceError
from rlhf_core.escaping import visible

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime
    from uuid import UUID

    from httpx import Request
    from prefect.client.orchestration import PrefectClient
    from rich.console import Console

    from infra.prefect_access import Access

LOOK_S = 0.5
UNTAKEN_NOTICE_S = 30.0
"""After this, an unstarted run's waiting is said, once."""
UNSTARTED_LIMIT_S = 600.0
"""A worker takes a run within seconds, and the longest start, imports on a cold disk, is a minute."""
AWAY_LIMIT_S = 180.0
"""A server that is started again is away for ten seconds or so; SQLite may wait a minute for a lock, and again."""
CRASH_LIMIT_S = 45.0
"""A run that the server starts again is `Restarting` within this time: a busy server takes half a minute."""
RESTART_LIMIT_S = 120.0
_LAST_LOOKS = 10
_PAGE = 200
_LATE_S = 30.0
"""A line reaches the server up to so much later than its time says; the last look takes later ones too."""
_SERVER_ERRORS = 500
_TOO_MANY_REQUESTS = 429
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
    return run_deployment(preset, param)


def run_deployment(preset: str, param: Given, *, wait: bool = True) -> int:
    """Run a deployment and return the exit status.

    Args:
        preset: of `run`.
        param: of `run`.
        wait: follow the run; without, it is started, and 0 is returned.

    Raises:
        ServiceError: there is no server, or it refuses.
        ConfigError: there is no such deployment, or it does not take the parameters.
    """
    import prefect  # noqa: F401  # before the event loop, in which it cannot start its plugins

    from flows.cli.parameters import read_parameters
    from infra.prefect_access import access_to

    screen = console()
    deployment = _full_name(preset)
    parameters = read_parameters(param)
    api_url, here = _api_url(screen)
    access = access_to(api_url)
    with _refusals_in_words(api_url, access):
        return asyncio.run(_run(deployment, parameters, api_url, access, screen, here=here, wait=wait))


def find_deployment(preset: str) -> Any:
    """Return what the server says of a deployment, which is named as for `run`.

    Raises:
        ServiceError: there is no server, or it refuses.
        ConfigError: it has no such deployment.
    """
    import prefect  # noqa: F401  # as above

    from infra.prefect_access import access_to

    api_url, _ = _api_url(console())
    access = access_to(api_url)

    async def find() -> Any:
        async with _client(api_url, access) as client:
            return await _deployment(client, _full_name(preset))

    with _refusals_in_words(api_url, access):
        return asyncio.run(find())


@contextmanager
def _refusals_in_words(api_url: str, access: Access) -> Iterator[None]:
    from httpx import HTTPError, HTTPStatusError, InvalidURL, codes

    from infra.prefect_access import refusal

    try:
        yield
    except HTTPStatusError as error:
        if error.response.status_code == codes.UNAUTHORIZED:
            raise ServiceError(refusal(api_url, access)) from error
        raise ServiceError(f"the Prefect server at {api_url} refuses: {_detail(error)}") from error
    except (HTTPError, InvalidURL) as error:
        why = str(error) or type(error).__name__
        raise ServiceError(
            f"the Prefect server at {api_url} does not answer ({why}); run `rlhf up`, or correct PREFECT_API_URL"
        ) from error


def _full_name(preset: str) -> str:
    return preset if "/" in preset else f"pipeline/{preset}"


def _api_url(screen: Console) -> tuple[str, bool]:
    """Return the server to run on, and whether it is this installation's own, which is taken while it runs.

    Raises:
        ServiceError: if there is none.
    """
    from infra import services
    from infra.settings import settings

    known = settings()
    ours, told = services.running_api_url(known), known.prefect_api_url
    if ours is None and told is None:
        raise ServiceError("no Prefect server is known here; start one with `rlhf up`, or set PREFECT_API_URL")
    if ours and told and told.rstrip("/") != ours:
        screen.print(
            f"PREFECT_API_URL is {told}, but the local stack runs: the run goes to {ours} "
            "(`rlhf down` first, to run elsewhere)",
            style="yellow",
        )
    return ours or str(told), ours is not None


async def _run(
    deployment: str,
    parameters: dict[str, Any],
    api_url: str,
    access: Access,
    screen: Console,
    *,
    here: bool,
    wait: bool,
) -> int:
    from rich.text import Text

    from tasks.progress import PREFIX

    async with _client(api_url, access) as client:
        found = await _deployment(client, deployment)
        flow_run = await _start(client, found, deployment, parameters, here=here)
        page = api_url.removesuffix("/").removesuffix("/api")
        screen.print(f"{deployment}: run {flow_run.name}, {page}/runs/flow-run/{flow_run.id}")
        if not wait:
            return 0
        try:
            state = await Follower(client, flow_run, screen, prefix=PREFIX).follow()
        except (KeyboardInterrupt, asyncio.CancelledError):  # Ctrl-C, outside an event loop and inside one
            screen.print(f"\nThe run goes on without this terminal; end it with: prefect flow-run cancel {flow_run.id}")
            return 130
    if not state.is_completed():
        screen.print(
            Text.assemble((visible(state.name), "bold red"), f": {visible(state.message or 'without a word')}")
        )
        return 1
    _show_report(flow_run.id, screen)
    told = f"finished: {state.message}" if state.message else "finished"
    screen.print(told, soft_wrap=True)  # references in it are copied
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
    check_parameters(deployment, parameters, schema, configured=here and "preset" in known)
    if "preset" in known:  # a flow of ours
        parameters = placed(parameters, here=here)
        if here:
            check_configuration(
                {"preset": known["preset"].get("default"), **found.parameters, **parameters}, found.tags
            )
    try:
        return await client.create_flow_run_from_deployment(found.id, parameters=parameters)
    except HTTPStatusError as error:
        if error.response.status_code not in {codes.CONFLICT, codes.UNPROCESSABLE_ENTITY}:
            raise
        raise ConfigError(
            f"{deployment} refuses: {_detail(error)} (its parameters are {', '.join(known) or 'none'})"
            + ("; it knows presets and keys as of the last `rlhf up`" if here else "")
        ) from error


def _detail(error: Any) -> str:
    from infra.services.prefect_api import detail_of

    return detail_of(error.response.text) or f"status {error.response.status_code}"


class Follower:
    """Prints the marked lines of one run, whose log has those of its stages, too."""

    def __init__(self, client: Any, flow_run: Any, screen: Console, *, prefix: str) -> None:
        self._client = client
        self._run_id: UUID = flow_run.id
        self._name = f"run {flow_run.name} ({flow_run.id})"
        self._screen = screen
        self._prefix = prefix
        self._said: set[UUID] = set()
        self._latest: datetime | None = None
        self._last = ""
        self._began = time.monotonic()
        self._answered = self._began
        self._started = False
        self._notice_given = False
        self._crash: Any | None = None
        self._crash_seen = self._began

    async def follow(self) -> Any:
        """Print lines until the run is in a final state, and return that state.

        Raises:
            ServiceError: if no worker started the run, or the server stayed away; the run itself goes on.
        """
        from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

        from infra.services.automations import RESTARTING

        # The client's own retries wait for minutes without a word: here the deadline is ours.
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            while True:
                try:
                    state = await self._look()
                except Exception as error:
                    if self._crash is not None and self._crash.name != RESTARTING:
                        return self._crash  # it ended with the stack, as by `rlhf down`
                    self._raise_unless_passing(error)
                else:
                    self._answered = time.monotonic()
                    if state is not None:
                        return state
                await asyncio.sleep(LOOK_S)

    async def _look(self) -> Any | None:
        """Print what is new; return the state once it is final and all is printed."""
        flow_run = await self._client.read_flow_run(self._run_id)
        state = flow_run.state
        if state is None or not state.is_crashed():
            self._crash = None
        if state is not None and state.is_final() and not self._is_restarted(flow_run):
            await self._print_last_lines(state)
            return state
        self._watch_start(state)
        await self._print_lines(since=self._latest)
        return None

    async def _print_last_lines(self, state: Any) -> None:
        """Print what is still to come: lines are sent in batches of half a second, and our flows' last one is known."""
        told = state.message or ""
        for _ in range(_LAST_LOOKS):
            await asyncio.sleep(2 * LOOK_S / _LAST_LOOKS)
            await self._print_lines(since=self._latest)
            if self._last and (told == self._last or told.startswith(f"{self._last} (rlhf ")):
                break
        await self._print_lines(since=None)

    def _is_restarted(self, flow_run: Any) -> bool:
        """Whether a run that crashed is about to be started again, which is said once for each crash."""
        from infra.services.automations import RESTARTING, RESUMES

        state = flow_run.state
        if not state.is_crashed() or RESUMES not in flow_run.tags:
            return False
        if self._crash is None or self._crash.id != state.id:
            if state.name == RESTARTING:
                self._screen.print(state.message, style="yellow")
            elif self._crash is None:
                told = f"the run crashed; waiting up to {CRASH_LIMIT_S:.0f} s for the server to start it again"
                self._screen.print(told, style="yellow")
            self._crash, self._crash_seen = state, time.monotonic()
        limit = RESTART_LIMIT_S if state.name == RESTARTING else CRASH_LIMIT_S
        return time.monotonic() - self._crash_seen < limit

    def _watch_start(self, state: Any | None) -> None:
        if self._started:
            return
        waited = time.monotonic() - self._began
        if state is not None and not (state.is_scheduled() or state.is_pending()):
            self._started = True
            if state.is_running():
                self._screen.print("running", style="dim")
            return
        if waited > UNTAKEN_NOTICE_S and not self._notice_given:
            self._notice_given = True
            taken = state is not None and state.is_pending()
            what = "a worker has taken the run, but not started it" if taken else "no worker has taken the run"
            self._screen.print(f"{what} after {UNTAKEN_NOTICE_S:.0f} s (see `rlhf status`); waiting", style="yellow")
        if waited > UNSTARTED_LIMIT_S:
            raise ServiceError(
                f"{self._name} has not started within {UNSTARTED_LIMIT_S / 60:.0f} min: look with `rlhf status` "
                "whether a worker runs, and start one with `rlhf up`; the run waits for it, unless you end it with "
                f"prefect flow-run cancel {self._run_id}"
            )

    async def _print_lines(self, *, since: datetime | None) -> None:
        """Print the marked lines that were not printed yet, page by page, oldest first."""
        from datetime import timedelta

        from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId, LogFilterTimestamp
        from prefect.client.schemas.sorting import LogSort
        from rich.text import Text

        wanted = LogFilter(
            flow_run_id=LogFilterFlowRunId(any_=[self._run_id]),
            timestamp=None
            if since is None
            else LogFilterTimestamp.model_validate({"after_": since - timedelta(seconds=_LATE_S)}),
        )
        offset, page = 0, None
        while page is None or len(page) == _PAGE:
            page = await self._client.read_logs(wanted, limit=_PAGE, offset=offset, sort=LogSort.TIMESTAMP_ASC)
            offset += len(page)
            for log in page:
                if log.id in self._said:
                    continue
                self._said.add(log.id)
                self._latest = max(filter(None, (self._latest, log.timestamp)))
                if log.message.startswith(self._prefix):
                    at = f"{log.timestamp.astimezone():%H:%M:%S}"
                    self._screen.print(Text.assemble((at, "dim"), " ", visible(log.message)))
                    self._last = log.message.split(maxsplit=2)[-1]  # without the mark and the stage

    def _raise_unless_passing(self, error: Exception) -> None:
        """Return if the error may pass, as when the server is started again; else raise one for the user."""
        from httpx import HTTPStatusError, TransportError
        from prefect.exceptions import ObjectNotFound

        if isinstance(error, ObjectNotFound):
            raise ServiceError(f"{self._name} is not on the server any more: somebody has deleted it") from error
        status = error.response.status_code if isinstance(error, HTTPStatusError) else 0
        passing = isinstance(error, TransportError) or status >= _SERVER_ERRORS or status == _TOO_MANY_REQUESTS
        if not passing:
            raise error
        if time.monotonic() - self._answered > AWAY_LIMIT_S:
            raise ServiceError(
                f"the Prefect server has not answered for {AWAY_LIMIT_S:.0f} s ({str(error) or type(error).__name__}); "
                f"{self._name} may go on without it: bring it back with `rlhf up`, and look there"
            ) from error


def _show_report(flow_run_id: UUID, screen: Console) -> None:
    from rich.markdown import Markdown

    from infra.artifacts import open_default_store
    from rlhf_core.escaping import PICTURE_LINE

    store = open_default_store()
    manifest = store.find("run", str(flow_run_id))
    if manifest is None:  # a single stage has no report of its own
        return
    report = store.read_bytes(manifest, "report.md").decode()
    named = PICTURE_LINE.sub(r"*\1:* `\2`", report)  # a terminal shows no pictures
    screen.print(Markdown(named, hyperlinks=False))
    uri, pictures = manifest.ref.uri, [entry.path for entry in manifest.files if entry.path.endswith(".png")]
    whole = f"; rlhf page {uri}" if any(entry.path == "report.html" for entry in manifest.files) else ""
    screen.print(f"stored as {uri}; rlhf artifacts lineage {uri}{whole}", style="dim")
    if not pictures:  # of a night that had nothing to learn
        return
    screen.print(f"pictures ({', '.join(pictures)}) and samples.md: rlhf artifacts fetch {uri} DIRECTORY", style="dim")

"""What is done first in every process of Prefect: a worker and its flows learn to wait for a server that is away.

A worker also learns to report each crash once, to end the children of a run that it had to kill, to fork its flows
(infra/forked_flows.py), to look after the deadlines of approvals (infra/services/approvals.py) and, in a local stack,
to keep its home directory tidy (infra/services/tidying.py); a flow, to end its log with its sentence.

A `prefect` command that a person types in the checkout does not wait: if no server answers, or one refuses, it prints
one sentence. Prefect alone would print a traceback of eighty lines or, if no server is known, start a temporary one
without deployments. The local server's password is in `.env`. It is never sent to another server whose address was
exported, to a proxy, or to another user who listens at the server's port while the server is away.

This is a plugin for Prefect: pyproject.toml names it, so that it is loaded by what starts in the checkout. The
environment of workers tells them to load it (`infra/services/worker.py`).
"""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, getproxies, proxy_bypass
from weakref import WeakValueDictionary

from prefect.plugins import SetupResult, register_hook
from prefect.settings import get_current_settings

from infra import loopback
from infra.errors import ServiceError, SettingsError
from infra.loopback import always_expect, open_url, without_proxy
from infra.prefect_access import Access, origin, own_server, refusal
from infra.settings import inherited_environment, is_of_another_server, settings

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import FlowRun, State
    from prefect.plugins import HookContext
    from prefect.runner._state_proposer import StateProposer

ASKING = frozenset(
    [
        "artifact",
        "automation",
        "block",
        "concurrency-limit",
        "deploy",
        "deployment",
        "event",
        "flow",
        "flow-run",
        "gcl",
        "global-concurrency-limit",
        "task-run",
        "variable",
        "work-pool",
        "work-queue",
    ]
)
"""The commands that talk to the server at once, in the singular: Prefect takes the plural too."""
_PORTS = {"http": 80, "https": 443}
_TIMEOUT_S = 10.0
_SERVER_ERRORS = 500
_WORKERS_S = 24 * 3600.0


@register_hook
def setup_environment(*, ctx: HookContext) -> SetupResult | None:
    """Let a worker or flow wait for its server; end a command that would not find its server or be refused there.

    Args:
        ctx: what Prefect tells its plugins when it starts.

    Returns:
        Settings that withhold a password of another server, and those that reach the local stack's server.

    Raises:
        SystemExit: with the sentence.
    """
    if limit_s := patience_s(inherited_environment()):
        from infra.patience import install  # noqa: PLC0415 - half of Prefect: a typed command does not need it

        install(limit_s)
        outlive_readers()
        if _is_worker(inherited_environment()):
            # this worker's alone; and removed before there are threads, one of which might read the environment
            address = os.environ.pop("RLHF_FLOWS_SOCKET", None)
            withhold_second_reports()
            cancel_children_too()
            from infra.services.approvals import watch_deadlines  # noqa: PLC0415 - as above
            from infra.services.tidying import keep_tidy  # noqa: PLC0415 - as above

            keep_tidy()
            watch_deadlines()
            if address:
                from infra.forked_flows import fork_flows  # noqa: PLC0415 - as above

                fork_flows(Path(address))
        else:
            withhold_tracebacks()
            end_at_once()
    asks = not limit_s and asks_the_server(sys.argv)
    access = _prefects_access()
    told: dict[str, str] = {}
    try:
        if own := own_server(ctx.api_url) if ctx.api_url else None:
            always_expect(own.users, own.port)
            told = without_proxy(inherited_environment()) if getproxies() else {}
            told |= {"PREFECT_API_URL": own.url} if own.url != ctx.api_url else {}
        elif ctx.api_url and is_of_another_server(access.auth_string, ctx.api_url, settings().home):
            access = access._replace(auth_string=None, source=origin("PREFECT_API_KEY") if access.api_key else None)
            told = {"PREFECT_API_AUTH_STRING": ""}
        fault = fault_of(own.url if own else ctx.api_url, access) if asks else None
    except SettingsError as error:  # no business of a program that only imports Prefect
        fault = str(error) if asks else None
    if fault:
        raise SystemExit(f"prefect: {fault}")
    return SetupResult(env=told) if told else None


class _Output(io.RawIOBase):
    """Where a process writes to, and nowhere once nobody reads it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def writable(self) -> bool:
        """Whether it can be written to: always."""
        return True

    def write(self, data: Any) -> int:
        """Write what can be written at once, and return how much that was."""
        try:
            return os.write(self._descriptor, data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._descriptor)
            os.close(nowhere)
            return len(data)


def outlive_readers() -> None:
    """Let this process go on writing when nobody reads it: a flow's lines go through a pipe to its worker.

    A worker that is killed leaves its flows to finish, and the next line that one of them logs would end it.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        out = io.BufferedWriter(_Output(stream.fileno()))
        setattr(sys, name, io.TextIOWrapper(out, stream.encoding, "backslashreplace", write_through=True))


def patience_s(variables: Mapping[str, str]) -> float:
    """Return how long a process waits for a server that is away; 0 unless it is a worker, or a worker started it.

    A run ends when the server stays away. Its worker waits on: it has to tell what became of the run.

    Args:
        variables: the process's environment.
    """
    limit_s = float(variables.get("RLHF_SERVER_PATIENCE_S") or 0)
    return max(limit_s, _WORKERS_S) if limit_s and _is_worker(variables) else limit_s


def _is_worker(variables: Mapping[str, str]) -> bool:
    """Whether a process that was told to wait for its server is a worker, not a flow."""
    return "PREFECT__FLOW_RUN_ID" not in variables


def withhold_second_reports() -> None:
    """Let this worker report each crash once.

    Prefect's worker reports the crash of a process at once, loads the flow to look for its hooks, and then reports it
    again. On a busy machine the run may have been scheduled again by then. The server would take the second report for
    another crash, of a run that has not begun, and such a run is not started again.
    """
    from prefect.runner._state_proposer import StateProposer  # noqa: PLC0415 - a second, which no flow needs
    from prefect.workers.base import BaseWorker  # noqa: PLC0415

    first, second = StateProposer.propose_crashed, BaseWorker._propose_crashed_state
    reported: WeakValueDictionary[int, FlowRun] = WeakValueDictionary()  # both have the same object for one start

    async def report(self: StateProposer, flow_run: FlowRun, message: str) -> State[Any] | None:
        if state := await first(self, flow_run, message):
            reported[id(flow_run)] = flow_run
        return state

    async def report_again(self: Any, flow_run: FlowRun, message: str, client: PrefectClient | None = None) -> None:
        if id(flow_run) not in reported:
            await second(self, flow_run, message, client)

    StateProposer.propose_crashed = report  # type: ignore[method-assign]
    BaseWorker._propose_crashed_state = report_again  # type: ignore[method-assign]


def cancel_children_too() -> None:
    """Let this worker mark the children of a cancelled run as cancelled, where they are not done.

    A run ends its children itself; one whose process did not end in time is killed, and nobody would say so of them.
    """
    from prefect.client.schemas.filters import FlowRunFilter  # noqa: PLC0415 - as above
    from prefect.runner._state_proposer import StateProposer  # noqa: PLC0415
    from prefect.states import Cancelled  # noqa: PLC0415

    alone = StateProposer.propose_cancelled
    under_way = {"type": {"any_": ["SCHEDULED", "PENDING", "RUNNING", "CANCELLING", "PAUSED"]}}

    async def cancel_children(client: PrefectClient, run_id: UUID) -> None:
        wanted = {"parent_flow_run_id": {"any_": [run_id]}, "state": under_way}
        for child in await client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(wanted)):
            await cancel_children(client, child.id)
            await client.set_flow_run_state(child.id, Cancelled(message="The run that began it was cancelled."))

    async def cancel(self: StateProposer, flow_run: FlowRun, state_updates: dict[str, Any] | None = None) -> bool:
        is_cancelled = await alone(self, flow_run, state_updates)
        if is_cancelled:
            await cancel_children(self._client, flow_run.id)
        return is_cancelled

    StateProposer.propose_cancelled = cancel  # type: ignore[method-assign]


def withhold_tracebacks() -> None:
    """Let this flow's log end with its sentence: Prefect adds eighty lines of its own code where a run has failed."""
    from prefect.exceptions import CancelledRun, CrashedRun, FailedRun  # noqa: PLC0415 - as above

    def is_news(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, CancelledRun | CrashedRun | FailedRun)  # of a state that is in the log

    logging.getLogger("prefect.flow_runs").addFilter(is_news)


def end_at_once() -> None:
    """Let this flow, and those in it, end without a wait for the thread of their heartbeats, which sleeps a second."""
    from prefect import flow_engine  # noqa: PLC0415 - as above

    engine: Any = flow_engine
    engine._send_heartbeats = partial(engine._send_heartbeats, join_on_exit=False)


def asks_the_server(words: Sequence[str]) -> bool:
    """Whether this is a command line of Prefect's that needs a server.

    Args:
        words: as in `sys.argv`.
    """
    program, *rest = words
    if Path(program).name != "prefect" or "--help" in rest:
        return False
    while rest and rest[0].startswith("-"):
        del rest[: 2 if rest[0] in {"-p", "--profile"} else 1]
    command = rest[0].removesuffix("s") if rest else ""
    return command in ASKING and (len(rest) > 1 or command == "deploy")  # a group alone shows its help


def fault_of(api_url: str | None, access: Access | None = None) -> str | None:
    """Return what keeps a command from its server; None if nothing is known to.

    Args:
        api_url: the server's, as Prefect's settings have it.
        access: who the command will say that it is; None: whether the server takes that is not asked.
    """
    if not api_url:
        return "no Prefect server is known here; start one with `rlhf up`, or set PREFECT_API_URL"
    if not _listens(api_url):
        fault = f"the Prefect server at {api_url} does not answer"
    elif urlsplit(api_url).hostname in loopback.HOSTS and _is_another_program(api_url):
        fault = f"what answers at {api_url} is no Prefect server"
    else:
        return _refusal(api_url, access) if access else None
    from infra.services import running_api_url  # noqa: PLC0415 - it takes a second, and this is loaded with Prefect

    ours = running_api_url(settings())
    if ours:
        return f"{fault}; the local stack's is {ours}: set PREFECT_API_URL to it, or unset it and run `rlhf up`"
    return f"{fault}; run `rlhf up`, or correct PREFECT_API_URL"


def _prefects_access() -> Access:
    """Return who Prefect's own client is told that we are, whatever the server."""
    api = get_current_settings().api
    auth_string = api.auth_string.get_secret_value() if api.auth_string else None
    key = api.key.get_secret_value() if api.key else None
    return Access(
        auth_string or None,
        key,
        dict(get_current_settings().client.custom_headers),
        Path(api.ssl_cert_file) if api.ssl_cert_file else None,
        api.tls_insecure_skip_verify,
        origin("PREFECT_API_AUTH_STRING") if auth_string else origin("PREFECT_API_KEY") if key else None,
    )


def _refusal(api_url: str, access: Access) -> str | None:
    """Return what to say of a server that refuses our credentials; None if it takes them, or nothing is known."""
    request = Request(f"{api_url.rstrip('/')}/admin/version")
    for name, value in access.all_headers.items():
        request.add_unredirected_header(name, value)
    try:
        tls = access.tls() if urlsplit(api_url).scheme == "https" else None
        with open_url(request, timeout_s=_TIMEOUT_S, tls=tls):
            return None
    except ServiceError as error:
        return str(error)
    except HTTPError as error:
        return refusal(api_url, access) if error.code == HTTPStatus.UNAUTHORIZED else None
    except (HTTPException, ValueError, OSError):
        return None  # Prefect's own client will say what it is


def _listens(api_url: str) -> bool:
    address = urlsplit(api_url)
    host, scheme = address.hostname or "", address.scheme
    if host not in loopback.HOSTS and scheme in getproxies() and not proxy_bypass(host):
        return True  # the proxy knows
    try:
        with socket.create_connection((host, address.port or _PORTS.get(scheme, 80)), timeout=_TIMEOUT_S):
            return True
    except (OSError, ValueError):  # ValueError: no address at all
        return False


def _is_another_program(api_url: str) -> bool:
    """Whether something other than a Prefect server answers; a busy server may take its time."""
    try:
        with open_url(f"{api_url.rstrip('/')}/health", timeout_s=_TIMEOUT_S) as answer:
            return json.loads(answer.read()) is not True
    except HTTPError as error:
        return error.code < _SERVER_ERRORS
    except (HTTPException, ValueError):
        return True
    except OSError:
        return False

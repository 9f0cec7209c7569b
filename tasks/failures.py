"""Which errors pass, and what is done about those that do: the one place that decides it (docs/adr/0029).

An error passes if the same attempt may go well later although nobody has repaired anything: a server that is away, a
cluster without room, a dead process. It is *tried again* within the run, as often as `further_attempts` says; one that
is still there then ends the run as Crashed, and the Prefect server's automations start it again from its last commit.
Every other error is *final*: bad data, a number that is not finite, a wrong key, a full disk, a bug.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from infra.errors import (
    AWAY_ERRNOS,
    ClusterNotReadyError,
    InfraError,
    StoreAwayError,
    StoreNotReadyError,
    is_untrusted,
)
from rlhf_core.errors import DataAwayError, LostRankError, NoRoomError, RlhfError

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

DELAYS_S = (2.0, 10.0, 30.0, 60.0, 120.0, 240.0, 300.0)
"""From each failed attempt of a task to the next."""
PATIENT = len(DELAYS_S)
"""Further attempts where each costs little: what is missing is not there yet."""
FEW = 2
"""Further attempts where each may cost hours of work, or where a person waits for an answer."""
_NOT_THERE_YET = (ClusterNotReadyError, NoRoomError, StoreNotReadyError, DataAwayError)
_AWAY = {
    "httpx": ("NetworkError", "TimeoutException", "RemoteProtocolError", "ProxyError"),
    "httpcore": ("NetworkError", "TimeoutException", "ProtocolError"),
    "requests.exceptions": ("ConnectionError", "Timeout", "ChunkedEncodingError"),
    "urllib3.exceptions": ("ProtocolError", "NewConnectionError", "TimeoutError", "MaxRetryError"),
    "aiohttp": ("ClientConnectionError", "ClientPayloadError"),
    "botocore.exceptions": ("ConnectionError", "HTTPClientError", "IncompleteReadError"),
    "websockets.exceptions": ("ConnectionClosed",),
    "socket": ("gaierror",),
}
"""By module, what libraries raise where a server is away; a module that was never imported has raised nothing."""
_OFFLINE = {"huggingface_hub.errors": ("OfflineModeIsEnabled",)}
"""A connection that failed, as its class has it: but the user has asked for none."""
_DIED = {"ray.exceptions": ("RayActorError", "OutOfMemoryError", "NodeDiedError", "ObjectLostError")}
"""The second: Ray ended the process, for room. Nodes die, too: they are preempted."""
_MAKERS: Mapping[str, tuple[str, ...]] = {"rlhf_core.rollout.lease_queue": ("MakersLostError",)}
_IS_UNATTENDED: ContextVar[bool] = ContextVar("is_unattended", default=False)


def passes(error: BaseException) -> bool:
    """Return whether the same attempt may go well later, although nobody has repaired anything."""
    return further_attempts(error) is not None


def further_attempts(error: BaseException) -> int | None:
    """Return how often a task that met an error is tried again in its run; None if the error does not pass.

    0 means that what was missing has been waited for already: the run is left to be started again at once.
    """
    error = _inner(error)
    if is_untrusted(error) or _is_of(error, _OFFLINE):
        return None
    if isinstance(error, StoreAwayError):
        return 0  # it was asked for as long as a run waits
    if isinstance(error, _NOT_THERE_YET) or _is_away(error):
        return PATIENT if _IS_UNATTENDED.get() else FEW
    if isinstance(error, RlhfError | InfraError):
        return FEW if error.passes else None
    return FEW if isinstance(error, TimeoutError) or _is_of(error, _DIED) else None


def has_died(error: BaseException) -> bool:
    """Return whether a process of the run's cluster has ended, and could not say why."""
    error = _inner(error)
    return isinstance(error, LostRankError) or _is_of(error, {**_DIED, **_MAKERS})


def passes_in(_task: Any, task_run: Any, state: Any) -> bool:
    """As Prefect asks it of a failed task: whether there is to be another attempt."""
    left = further_attempts(state.result(raise_on_failure=False))
    return left is not None and task_run.run_count <= left


def sentence(error: BaseException) -> str:
    """Return one line for a person, of an error that was expected to pass, and was still there at the last attempt."""
    told = first_line(error)
    error = _inner(error)
    if isinstance(error, RlhfError | InfraError):
        return told
    if _is_of(error, _DIED):
        return f"a process of the run's cluster died: {told} Look into the cluster's log"
    if server := _server_of(error):
        return f"{server} did not answer, however often it was asked ({type(error).__name__}: {told})"
    if _is_away(error):
        return f"a server did not answer ({type(error).__name__}: {told})"
    return told


def ends_as(error: BaseException) -> str:
    """Return what a run is called that an expected error ends: words of a fixed list, where a message has figures."""
    error = _inner(error)
    if isinstance(error, RlhfError | InfraError):
        return error.ends_as
    if _is_of(error, _DIED):
        return LostRankError.ends_as
    return "Failed: server out of reach" if _is_away(error) else "Failed: timed out"


def first_line(error: BaseException) -> str:
    """Return the first line of what was raised, here or inside an actor."""
    error = _inner(error)
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def attended_or_not(run: FlowRun | None) -> Iterator[None]:
    """Note, for the length of a block, whether anybody waits for a run: nobody does for one of a deployment.

    Args:
        run: the outermost; None outside a run.
    """
    token = _IS_UNATTENDED.set(run is not None and run.deployment_id is not None)
    try:
        yield
    finally:
        _IS_UNATTENDED.reset(token)


def is_unattended() -> bool:
    """Return whether this is a run of a deployment: it waits for a server that is away from the start."""
    return _IS_UNATTENDED.get()


def _inner(error: BaseException) -> BaseException:
    """Return what was raised inside an actor, in place of Ray's wrapper."""
    return error.cause if _is_of(error, {"ray.exceptions": ("RayTaskError",)}) else error  # type: ignore[attr-defined]


def _is_away(error: BaseException) -> bool:
    if isinstance(error, ConnectionError) or _is_of(error, _AWAY):
        return True
    if isinstance(error, OSError) and error.errno in AWAY_ERRNOS:
        return True
    status = getattr(getattr(error, "response", None), "status_code", None)  # of httpx, requests and Prefect
    return isinstance(status, int) and (
        status >= HTTPStatus.INTERNAL_SERVER_ERROR
        or status in {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS}
    )


def _server_of(error: BaseException) -> str | None:
    """Return what a request was for that httpx made, as Prefect's client does; None if it was another's."""
    if not _is_of(error, {"httpx": ("HTTPError",)}):
        return None
    try:
        url = error.request.url  # type: ignore[attr-defined]
    except RuntimeError:  # none was made yet
        return None
    where = f"{url.scheme}://{url.host}{f':{url.port}' if url.port else ''}"
    return f"the Prefect server at {where}" if url.path.startswith("/api/") else f"the server at {where}"


def _is_of(error: BaseException, names: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether an error is of one of the classes, by module: none is imported for it."""
    for module, classes in names.items():
        loaded = sys.modules.get(module)
        found = tuple(getattr(loaded, each) for each in classes if hasattr(loaded, each))
        if found and isinstance(error, found):
            return True
    return False

"""The few calls to the Prefect server that the stack makes, without Prefect: its import alone takes seconds."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import Request

from infra.errors import InfraError, ServiceError
from infra.loopback import open_url
from infra.prefect_access import access_to, own_server, refusal

ANSWER_S = 60.0
"""A server that was away for minutes is busy with all that waited for it, and answers late."""
_LONGEST_DETAIL, _LONGEST_ANSWER = 600, 1_000_000
_PAGE = 200
"""Flow runs that the server hands out at once, at most."""


class RefusedError(ServiceError):
    """The server has understood a request, and does not do it."""


def call(api_url: str, method: str, path: str, body: Any = None, *, timeout_s: float = ANSWER_S) -> Any:
    """Return the server's answer, or None if there is no such thing.

    A server whose database is busy answers 503, and is asked again, as Prefect's own client does. Each server gets the
    credentials of its own address (`prefect_access`); a local stack's gets them only while its owner listens there.

    Raises:
        RefusedError: if the server refuses.
        ServiceError: if it does not answer, or fails.
        SettingsError: if a variable holds what it must not.
    """
    access, own = access_to(api_url), own_server(api_url)
    api_url = own.url if own else api_url
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = Request(f"{api_url}{quote(path, safe='/?=')}", data=data, method=method, headers=headers)
    for name, value in access.all_headers.items():
        request.add_unredirected_header(name, value)  # a redirect may lead to anybody
    tls = access.tls() if urlsplit(api_url).scheme == "https" else None
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if own:
                own.look()
            with open_url(request, timeout_s=timeout_s, tls=tls) as answer:
                text = answer.read()
                return json.loads(text) if text else {}
        except HTTPError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                return None
            if error.code == HTTPStatus.UNAUTHORIZED:
                raise ServiceError(refusal(api_url, access)) from None
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
                said = detail_of(error.read(_LONGEST_ANSWER).decode("utf-8", "replace"))
                told = f"the Prefect server answered {error.code} to {method} {path}: {said}"
                is_refusal = error.code < HTTPStatus.INTERNAL_SERVER_ERROR
                raise (RefusedError if is_refusal else ServiceError)(told) from None
        except (OSError, HTTPException) as error:  # the second, where it dies within its answer
            raise ServiceError(f"the Prefect server at {api_url} does not answer ({error}); run `rlhf up`") from None
        time.sleep(0.2)


def detail_of(answer: str) -> str:
    """Return what a server said of a refusal, in one line.

    >>> detail_of('{"exception_message": "Invalid request.", "exception_detail": [{"msg": "no name"}]}')
    'no name'
    """
    try:
        said = json.loads(answer)
    except ValueError:  # some other server
        said = answer
    if isinstance(said, dict):
        faults = said.get("exception_detail")
        messages = [str(each["msg"]) for each in faults] if isinstance(faults, list) and faults else []
        said = said.get("detail") or "; ".join(messages) or said.get("exception_message") or said
    return " ".join(str(said).split())[:_LONGEST_DETAIL]


def is_healthy(api_url: str) -> bool:
    """Whether something answers the health check as a server does; it gets no credentials."""
    try:
        tls = access_to(api_url).tls() if urlsplit(api_url).scheme == "https" else None
        with open_url(f"{api_url}/health", timeout_s=3.0, tls=tls) as answer:
            return json.loads(answer.read()) is True
    except (OSError, HTTPException, InfraError, ValueError):
        return False


def flow_runs(api_url: str, where: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all flow runs that match a filter, from all pages of the server.

    Args:
        api_url: the Prefect server's.
        where: the body of its `/flow_runs/filter`.

    Raises:
        ServiceError: if the server does not answer.
    """
    found: list[dict[str, Any]] = []
    while len(found) % _PAGE == 0:
        asked = {**where, "sort": "ID_DESC", "limit": _PAGE, "offset": len(found)}
        page = call(api_url, "POST", "/flow_runs/filter", asked)
        if not page:
            break
        found += page
    return found


def deployment(api_url: str, name: str) -> dict[str, Any] | None:
    """Return a deployment by its full name, `flow/deployment`; None when there is none."""
    found: dict[str, Any] | None = call(api_url, "GET", f"/deployments/name/{name}")
    return found

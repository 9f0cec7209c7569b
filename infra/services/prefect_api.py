"""The few calls to the Prefect server that the stack makes, without Prefect: its import alone takes seconds."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from http import HTTPStatus
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from infra.errors import ServiceError
from infra.settings import inherited_environment


def call(api_url: str, method: str, path: str, body: Any = None, *, timeout_s: float = 20.0) -> Any:
    """Return the server's answer, or None where there is no such thing.

    A server whose database is busy answers 503, and is asked again, as Prefect's own client does.

    Raises:
        ServiceError: if the server does not answer, or refuses.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **_authorization()}
    request = Request(f"{api_url}{quote(path, safe='/?=')}", data=data, method=method, headers=headers)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urlopen(request, timeout=timeout_s) as answer:
                text = answer.read()
                return json.loads(text) if text else {}
        except HTTPError as error:
            if error.code == HTTPStatus.NOT_FOUND:
                return None
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
                said = error.read(300).decode("utf-8", "replace")
                raise ServiceError(f"the Prefect server answered {error.code} to {method} {path}: {said}") from None
        except OSError as error:
            raise ServiceError(f"the Prefect server at {api_url} does not answer ({error}); run `rlhf up`") from None
        time.sleep(0.2)


def _authorization() -> dict[str, str]:
    """Return what a server that asks who we are is told, as Prefect's own client tells it."""
    told = inherited_environment()
    if name_and_password := told.get("PREFECT_API_AUTH_STRING"):
        return {"Authorization": f"Basic {b64encode(name_and_password.encode()).decode()}"}
    if key := told.get("PREFECT_API_KEY"):
        return {"Authorization": f"Bearer {key}"}
    return {}


def is_healthy(api_url: str) -> bool:
    """Whether the server answers its health check."""
    try:
        return call(api_url, "GET", "/health", timeout_s=3.0) is True
    except (ServiceError, ValueError):
        return False


def deployment(api_url: str, name: str) -> dict[str, Any] | None:
    """Return a deployment by its full name, `flow/deployment`; None when there is none."""
    found: dict[str, Any] | None = call(api_url, "GET", f"/deployments/name/{name}")
    return found

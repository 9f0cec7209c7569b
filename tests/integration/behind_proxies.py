"""Runs of a local stack that reach its store and its server through proxies, which may be away."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from infra.services import prefect_api
from infra.settings import read_env_file
from tests.integration.flaky_proxy import FlakyProxy, flaky_proxy
from tests.integration.local_stack import LocalStack


def proxy_of_store(stack: LocalStack) -> AbstractContextManager[FlakyProxy]:
    """Return a proxy before a stack's S3 server."""
    return flaky_proxy(_known(stack)["RLHF_S3_ENDPOINT_URL"])


def behind(stack: LocalStack, *, store: FlakyProxy, server: FlakyProxy | None = None) -> dict[str, str]:
    """Return the variables of a run that reaches the store, and perhaps the server, through a proxy."""
    variables = {**_known(stack), "RLHF_S3_ENDPOINT_URL": store.url}
    if server is None:
        return variables
    # its password is for its own address alone
    return {**variables, "PREFECT_API_URL": f"{server.url}/api", "PREFECT_API_AUTH_STRING": stack.password}


def start_with(stack: LocalStack, deployment: str, env: dict[str, str], **parameters: Any) -> str:
    """Start a run of a deployment whose process has further variables; return its id."""
    found = prefect_api.deployment(stack.api_url, deployment)
    assert found is not None
    body = {"parameters": parameters, "job_variables": {"env": env}}
    path = f"/deployments/{found['id']}/create_flow_run"
    return str(prefect_api.call(stack.api_url, "POST", path, body)["id"])


def _known(stack: LocalStack) -> dict[str, str]:
    """Return what a stack has written down of its store, all of it: half a pair of keys is refused."""
    known = read_env_file(stack.home / "stack.env")
    return {name: value for name, value in known.items() if name.startswith("RLHF_S")}

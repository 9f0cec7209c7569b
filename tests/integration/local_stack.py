"""A stack of the tests' own: in a temporary home, on free ports, gone when the tests are."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from infra.services import prefect_api, processes
from infra.services.state import StackState
from infra.settings import CHECKOUT, inherited_environment

T = TypeVar("T")
PROGRAMS = Path(sys.executable).parent
TINY_FLOWS = Path(__file__).parent / "tiny_flows"
_USERS_OWN = ("RLHF_", "PREFECT_", "AWS_")


@dataclass(frozen=True)
class LocalStack:
    """A running stack, and how to talk to it from a test."""

    home: Path
    env_file: Path
    """Plays the part of `.env` in the checkout; `prefect`, typed in its directory, reads it."""

    @property
    def environment(self) -> dict[str, str]:
        """A shell's environment, in which nothing but the home and the env file are told."""
        bare = inherited_environment(without_prefixes=_USERS_OWN)
        path = f"{PROGRAMS}:{bare.get('PATH', '')}"  # as after `source .venv/bin/activate`
        return {**bare, "PATH": path, "RLHF_HOME": str(self.home), "RLHF_ENV_FILE": str(self.env_file)}

    @property
    def state(self) -> StackState:
        return StackState.load(self.home)

    @property
    def api_url(self) -> str:
        return f"{self.state.services['server'].address}/api"

    def type(
        self, *command: str, cwd: Path = CHECKOUT, timeout_s: float = 300.0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command line as a user would, and return what it said."""
        return subprocess.run(
            command,
            cwd=cwd,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def pids(self) -> dict[str, int]:
        """Return the process of each service that runs."""
        return {name: record.pid for name, record in self.state.services.items() if record.process()}

    def processes(self) -> list[psutil.Process]:
        return processes.marked(self.state.id)

    def deploy_tiny_flows(self) -> None:
        result = self.type("prefect", "--no-prompt", "deploy", "--all", cwd=TINY_FLOWS, PREFECT_API_URL=self.api_url)
        assert result.returncode == 0, result.stdout + result.stderr

    def start_run(self, deployment: str, **parameters: Any) -> str:
        """Start a run of a deployment and return its id."""
        found = prefect_api.deployment(self.api_url, deployment)
        assert found is not None, deployment
        path = f"/deployments/{found['id']}/create_flow_run"
        return str(prefect_api.call(self.api_url, "POST", path, {"parameters": parameters})["id"])

    def run_state(self, run_id: str) -> str:
        return str(prefect_api.call(self.api_url, "GET", f"/flow_runs/{run_id}")["state"]["type"])


def wait_for(look: Callable[[], T | None], what: str, *, timeout_s: float = 60.0) -> T:
    """Return what is seen as soon as it is true.

    Raises:
        AssertionError: if it was not in time; names what was awaited.
    """
    deadline = time.monotonic() + timeout_s
    while not (seen := look()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.2)
    return seen


@contextmanager
def run_local_stack(directory: Path) -> Iterator[LocalStack]:
    """Bring a stack up with `rlhf up`; take it down with `rlhf down`, and see that nothing is left."""
    stack = LocalStack(directory / "home", directory / ".env")
    try:
        result = stack.type("rlhf", "up")
        assert result.returncode == 0, result.stdout + result.stderr
        yield stack
    finally:
        result = stack.type("rlhf", "down")
        left = stack.processes()
        processes.end(left, grace_s=0)  # a failure of `down` must not burden the tests that follow
        assert result.returncode == 0, result.stdout + result.stderr
        assert left == [], "`rlhf down` left processes behind"


@contextmanager
def usual_ports_occupied() -> Iterator[tuple[int, ...]]:
    """Occupy the ports that people expect, unless somebody else does."""
    ports = (4200, 8333)
    with ExitStack() as held:
        for port in ports:
            listener = held.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
                listener.listen()
            except OSError:
                continue
        yield ports


def read_json(result: subprocess.CompletedProcess[str]) -> Any:
    """Return what a command printed as JSON."""
    return json.loads(result.stdout)

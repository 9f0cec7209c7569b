"""A run that tells of its starts and goes on until it may end, for tests of what a crash is followed by."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

from infra.services import prefect_api
from infra.services.automations import RESTARTING
from tests.integration.local_stack import LocalStack, wait_for

ONE_START = ["Pending", "Submitting", "Running"]
STARTED_AGAIN = ["Crashed", RESTARTING, "Scheduled"]


class WaitingRun:
    """A run that waits until it is let go, and the starts that it told of."""

    def __init__(
        self,
        stack: LocalStack,
        directory: Path,
        *,
        flow: str = "waiting",
        deployment: str | None = None,
        due_in_s: float = 0.0,
        **parameters: Any,
    ) -> None:
        self.stack, self.directory = stack, directory
        directory.mkdir(exist_ok=True)
        due = (datetime.now(UTC) + timedelta(seconds=due_in_s)).isoformat()
        body = {
            "parameters": {"directory": str(directory), **parameters},
            "state": {"type": "SCHEDULED", "state_details": {"scheduled_time": due}},
        }
        found = prefect_api.deployment(stack.api_url, f"{flow}/{deployment or flow}")
        assert found is not None
        path = f"/deployments/{found['id']}/create_flow_run"
        self.id = str(prefect_api.call(stack.api_url, "POST", path, body)["id"])

    def starts(self) -> list[tuple[int, int]]:
        """Return process and number of each start, once the run has come to where it waits."""
        path = self.directory / "starts"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(process), int(number)) for process, number in map(str.split, lines)]

    def await_starts(self, starts: int, *, timeout_s: float = 120.0) -> None:
        """Wait until the run has begun so often."""
        wait_for(lambda: len(self.starts()) >= starts, f"start {starts} of the run", timeout_s=timeout_s)

    def await_start(self, start: int) -> None:
        """Wait until a start of the run waits."""

        def waits() -> bool:
            return len(self.starts()) >= start and (self.directory / "inside").exists()

        wait_for(waits, f"start {start} of the run", timeout_s=90)

    def kill(self, start: int) -> None:
        """Kill the process of a start while it waits."""
        self.await_start(start)
        (self.directory / "inside").unlink()
        os.kill(self.starts()[start - 1][0], signal.SIGKILL)

    def let_go(self) -> None:
        (self.directory / "may-end").touch()

    def await_state(self, *names: str, timeout_s: float = 90.0) -> None:
        wait_for(lambda: self.stack.run_state(self.id) in names, f"a run that is {names}", timeout_s=timeout_s)

    def await_name(self, name: str, *, timeout_s: float = 60.0) -> None:
        """Wait until the run has had a state of this name."""
        wait_for(lambda: name in self.history(), f"a run that was {name}", timeout_s=timeout_s)

    def history(self) -> list[str]:
        return self.stack.history(self.id)

    def began_at(self) -> float:
        """Return when it was Running first, in seconds since the epoch."""
        return self.times("Running")[0]

    def scheduled_again_at(self) -> float:
        """Return when it was scheduled last, in seconds since the epoch: after a crash, the restart."""
        return self.times("Scheduled")[-1]

    def times(self, name: str) -> list[float]:
        """Return when it has had states of a name, first to last, in seconds since the epoch."""
        states = self.stack.states(self.id)
        return [datetime.fromisoformat(state["timestamp"]).timestamp() for state in states if state["name"] == name]

    def run_count(self) -> int:
        """Return how often the server has seen it begin."""
        return int(prefect_api.call(self.stack.api_url, "GET", f"/flow_runs/{self.id}")["run_count"])


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Stop processes, as a machine that sleeps stops them; they go on after the block."""
    with ExitStack() as later:
        for pid in pids:
            process = psutil.Process(pid)
            process.suspend()
            later.callback(process.resume)
        yield

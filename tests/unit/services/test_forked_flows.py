"""Which runs of a worker are forked, and what becomes of one that crashed."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.workers import process as of_prefect

from infra import forked_flows
from infra.forked_flows import fork_flows
from infra.forked_processes import forking_python
from infra.settings import CHECKOUT

PREFECTS_COMMAND = "python -m prefect.engine"


class Worker:
    """Prefect's half of a worker, and what of it was used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loaded: list[UUID | None] = []
        process: Any = of_prefect

        def prepare(job: Any, *_: Any, **__: Any) -> None:
            job.command = job.command or PREFECTS_COMMAND

        async def load(flow_run: Any) -> str:
            self.loaded.append(flow_run.deployment_id)
            return "the flow with its hooks"

        monkeypatch.setattr(process.ProcessJobConfiguration, "prepare_for_flow_run", prepare)
        monkeypatch.setattr(process, "load_flow_from_flow_run", load)
        monkeypatch.setattr(forked_flows, "_start", lambda _: subprocess.Popen(["true"], stdin=subprocess.DEVNULL))
        fork_flows(Path("/nowhere/flows"))
        self._process = process

    def command_of(self, deployment: Any) -> str:
        job = self._process.ProcessJobConfiguration()
        job.prepare_for_flow_run(SimpleNamespace(), deployment)
        return str(job.command)

    def load(self, deployment: Any) -> Any:
        return asyncio.run(self._process.load_flow_from_flow_run(SimpleNamespace(deployment_id=deployment.id)))


def deployment(directory: Path, entrypoint: str = "flows/pipeline.py:pipeline") -> Any:
    step = {"prefect.deployments.steps.set_working_directory": {"directory": str(directory)}}
    return SimpleNamespace(id=uuid4(), entrypoint=entrypoint, pull_steps=[step])


def test_a_deployment_of_this_checkout_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Worker(monkeypatch).command_of(deployment(CHECKOUT)) == (
        f"{forking_python(Path('/nowhere/flows'))} -mprefect.engine"
    )


@pytest.mark.parametrize(
    "other",
    [deployment(Path("/another/checkout")), deployment(CHECKOUT, "tests/night/stages.py:pipeline")],
    ids=["of another checkout", "not of our flows"],
)
def test_another_checkouts_deployment_starts_as_prefect_starts_it(monkeypatch: pytest.MonkeyPatch, other: Any) -> None:
    worker = Worker(monkeypatch)
    assert worker.command_of(other) == PREFECTS_COMMAND
    assert worker.load(other) == "the flow with its hooks"


def test_a_crashed_run_that_was_forked_is_not_loaded_into_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """To load it would change the worker's working directory, where the next run's relative paths lie."""
    worker, ours = Worker(monkeypatch), deployment(CHECKOUT)
    worker.command_of(ours)
    flow = worker.load(ours)
    assert worker.loaded == []
    assert [*flow.on_crashed_hooks, *flow.on_cancellation_hooks] == []

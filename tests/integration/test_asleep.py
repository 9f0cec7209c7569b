"""A machine that sleeps for minutes, with real runs in SFT, PPO and evaluation: one process each, Completed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import pytest

from infra.services import automations
from tests.integration.local_stack import LocalStack, run_local_stack, wait_for
from tests.integration.stages import EPISODES, at_stage, flow_process
from tests.integration.test_chain import small
from tests.integration.waiting_run import ONE_START, STARTED_AGAIN, stopped
from tests.tiny_llama import write_tiny_llama

pytestmark = [pytest.mark.integration, pytest.mark.outages, pytest.mark.timeout(0)]

ASLEEP_S = float(os.environ.get("ASLEEP_S", "360"))
"""960 is worth a try, too."""
LOST_AFTER_S = ASLEEP_S - 30
"""Every run was silent for longer than one may be. A server that slept, too, knows why, and starts none again; one that
was awake starts each a second time."""
RUN_S = 900.0


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A stack that may sleep."""
    with run_local_stack(tmp_path_factory.mktemp("asleep")) as running:
        automations.install(running.api_url, automations.wanted(lost_after_s=LOST_AFTER_S))
        yield running


def stop_at(stack: LocalStack, model: Path, stage: str, seed: int) -> tuple[str, psutil.Process]:
    """Start a run, wait until it is at a stage (in PPO, behind an episode), and stop its process there.

    Returns:
        The run's id and its process.
    """
    given = {"model": str(model), "episodes": EPISODES, "seed": seed, "overrides": small(name=f"asleep-in-{stage}")}
    run = stack.start_run("pipeline/quickstart", **given)
    at_stage(stack, run, stage)
    process = flow_process(stack, run)
    process.suspend()
    return run, process


STAGES = ("evaluate", "sft", "ppo")
"""Of the three runs; the first waits for the others, the last does not wait."""


def stop_at_stages(stack: LocalStack, model: Path, asleep: ExitStack, *, first_seed: int) -> list[str]:
    """Return the runs of which each was stopped at one of the stages; they go on when the stack of contexts ends."""
    runs: list[str] = []
    for seed, stage in enumerate(STAGES, first_seed):
        run, process = stop_at(stack, model, stage, seed)
        asleep.callback(process.resume)
        runs.append(run)
    return runs


def assert_histories(stack: LocalStack, runs: list[str], history: list[str]) -> None:
    """Wait until all runs are over, and see what states they had."""
    for run in runs:
        wait_for(partial(stack.is_over, run), f"the run {run} to end", timeout_s=RUN_S)
    # a worker that just woke, on a busy machine, comes late
    told = {run: ([each for each in stack.history(run) if each != "Late"], stack.message(run)) for run in runs}
    assert [states for states, _ in told.values()] == [history] * len(runs), told


@pytest.mark.parametrize("whole", [True, False], ids=["everything", "server, worker and flows"])
def test_a_machine_that_sleeps_costs_no_run_in_any_stage(own: LocalStack, tmp_path: Path, whole: bool) -> None:
    model = write_tiny_llama(tmp_path / "tiny", seed=int(whole))
    with ExitStack() as asleep:
        runs = stop_at_stages(own, model, asleep, first_seed=10 * whole)
        services = [own.pids()["server"], own.pids()["worker"]]
        with stopped(*([each.pid for each in own.processes()] if whole else services)):
            time.sleep(ASLEEP_S)  # the time itself is what is tried
    assert_histories(own, runs, ["Scheduled", *ONE_START, "Completed"])


def test_a_second_start_that_a_server_elsewhere_brought_about_leaves_every_stage_to_the_first(
    own: LocalStack, tmp_path: Path
) -> None:
    model = write_tiny_llama(tmp_path / "tiny", seed=0)
    with ExitStack() as asleep:
        runs = stop_at_stages(own, model, asleep, first_seed=20)
        flows = [each.pid for run in runs for each in own.processes_of(run)]  # their clusters, too
        with stopped(*flows):
            with stopped(own.pids()["worker"]):
                time.sleep(ASLEEP_S)
            for run in runs:
                wait_for(partial(has_second_start, own, run), f"a second start of {run}", timeout_s=300)
    assert_histories(own, runs, ["Scheduled", *ONE_START, *STARTED_AGAIN, *ONE_START, "Completed"])
    for run in runs:
        assert {stage["run_count"] for stage in own.children(run)} == {1}, "the first process did all the work"


def has_second_start(stack: LocalStack, run: str) -> bool:
    """Return whether a second process of a run has found the first, and says so."""
    return any("works on this run and lives" in line for line in stack.log(run))

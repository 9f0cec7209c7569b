"""What a crash is followed by: the same run starts again, by nobody's hand, and not for ever."""

from __future__ import annotations

import os
import signal
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from infra.services import automations, prefect_api
from infra.services.automations import RESTARTING, RESTARTS
from tests.integration.local_stack import TINY_FLOWS, LocalStack, turn, usual_ports_occupied, wait_for
from tests.integration.waiting_run import ONE_START, STARTED_AGAIN, WaitingRun

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def resuming(stack: LocalStack) -> LocalStack:
    stack.deploy_tiny_flows(TINY_FLOWS, "resuming.yaml")
    return stack


def test_a_killed_run_is_started_again_once_as_the_same_run_and_ends_well(resuming: LocalStack, tmp_path: Path) -> None:
    run = WaitingRun(resuming, tmp_path)
    run.kill(1)
    wait_for(lambda: len(run.starts()) == 2, "the second start", timeout_s=90)
    assert [number for _, number in run.starts()] == [1, 2]
    run.let_go()
    run.await_state("COMPLETED")
    assert resuming.history(run.id) == ["Scheduled", *ONE_START, *STARTED_AGAIN, *ONE_START, "Completed"]
    [child] = resuming.children(run.id)  # the subflow goes on too, and is not doubled
    assert (child["state_type"], child["run_count"]) == ("COMPLETED", 2)
    assert len(run.starts()) == 2


@pytest.mark.parametrize(
    ("starts", "becomes", "says"),
    [
        (0, RESTARTING, "The run crashed before it began. It is started again in 30 s."),
        (1, RESTARTING, "The run crashed in start 1. It is started again in 30 s."),
        (3, RESTARTING, "The run crashed in start 3. It is started again in 30 s."),
        (
            4,
            "Failed: crashed in every start",
            "The run crashed in start 4 and is not started again by itself: look for the reason in its log",
        ),
    ],
)
def test_what_a_crash_is_followed_by_depends_on_the_number_of_starts(
    resuming: LocalStack, starts: int, becomes: str, says: str
) -> None:
    run = run_of_nobody(resuming)
    for _ in range(starts):
        resuming.set_state(run, "RUNNING")
    resuming.set_state(run, "CRASHED")
    wait_for(lambda: resuming.history(run)[-1] == becomes, f"the crash to be followed by {becomes}", timeout_s=60)
    assert resuming.message(run).startswith(says)
    resuming.delete_run(run)


def test_a_run_that_crashes_again_before_it_could_begin_again_is_left_alone(resuming: LocalStack) -> None:
    run, other = run_of_nobody(resuming), run_of_nobody(resuming)
    resuming.set_state(run, "RUNNING")
    resuming.set_state(run, "CRASHED")
    wait_for(lambda: resuming.history(run)[-1] == RESTARTING, "the first crash to be noticed", timeout_s=60)
    resuming.set_state(run, "CRASHED")
    resuming.set_state(other, "CRASHED")
    wait_for(lambda: resuming.history(other)[-1] == RESTARTING, "a later crash to be noticed", timeout_s=60)
    assert resuming.history(run) == ["Scheduled", "Running", "Crashed", RESTARTING, "Crashed"]
    resuming.delete_run(run)
    resuming.delete_run(other)


def run_of_nobody(stack: LocalStack) -> str:
    """Return a run that no worker takes: its states are what a worker and a flow would tell, and come from the test."""
    found = prefect_api.deployment(stack.api_url, "waiting/waiting")
    assert found is not None
    later = {"type": "SCHEDULED", "state_details": {"scheduled_time": "2099-01-01T00:00:00Z"}}
    path = f"/deployments/{found['id']}/create_flow_run"
    return str(prefect_api.call(stack.api_url, "POST", path, {"parameters": {"directory": "-"}, "state": later})["id"])


@pytest.mark.stack
def test_a_worker_that_is_done_with_a_crash_late_does_not_end_the_next_start(
    resuming: LocalStack, tmp_path: Path
) -> None:
    run = WaitingRun(resuming, tmp_path, flow="late")
    run.kill(1)
    run.await_starts(2)
    told = {"event": {"name": ["prefect.worker.executed-flow-run"]}, "related": {"id": [f"prefect.flow-run.{run.id}"]}}
    [done] = wait_for(
        lambda: prefect_api.call(resuming.api_url, "POST", "/events/filter", {"filter": told})["events"],
        "the worker to be done with the first start",
        timeout_s=120,
    )
    assert datetime.fromisoformat(done["occurred"]).timestamp() > run.times("Running")[1]
    run.let_go()
    run.await_state("COMPLETED")
    assert run.history() == ["Scheduled", *ONE_START, *STARTED_AGAIN, *ONE_START, "Completed"]


@pytest.mark.stack
def test_a_run_that_is_killed_four_times_has_failed(resuming: LocalStack, tmp_path: Path) -> None:
    run = WaitingRun(resuming, tmp_path)
    for start in range(1, RESTARTS + 2):
        run.kill(start)
    run.await_state("FAILED")
    once_more = [*STARTED_AGAIN, *ONE_START]
    assert resuming.history(run.id) == [
        "Scheduled",
        *ONE_START,
        *once_more * RESTARTS,
        "Crashed",
        "Failed: crashed in every start",
    ]
    assert [number for _, number in run.starts()] == [1, 2, 3, 4]


@pytest.mark.stack
def test_a_run_that_is_lost_with_its_worker_is_noticed_and_goes_on_with_the_next_worker_but_a_suspended_one_waits(
    own_stack: LocalStack, tmp_path: Path
) -> None:
    automations.install(own_stack.api_url, automations.wanted(lost_after_s=45))
    suspended = WaitingRun(own_stack, tmp_path / "suspended")
    suspended.await_start(1)
    own_stack.set_state(suspended.id, "PAUSED", name="Suspended", state_details={"pause_reschedule": True})
    heart = {
        "event": {"name": ["prefect.flow-run.heartbeat"]},
        "resource": {"id": [f"prefect.flow-run.{suspended.id}"]},
    }

    def beats() -> int:
        found = prefect_api.call(own_stack.api_url, "POST", "/events/filter", {"filter": heart})
        return len(found["events"])

    before = beats()
    wait_for(lambda: beats() > before, "a sign of life of the suspended run", timeout_s=90)
    suspended.let_go()
    wait_for(lambda: not own_stack.processes_of(suspended.id), "the end of the suspended run's process", timeout_s=90)
    run = WaitingRun(own_stack, tmp_path / "lost")
    run.await_start(1)
    psutil.Process(own_stack.pids()["worker"]).kill()
    run.kill(1)
    run.await_state("SCHEDULED", timeout_s=180)
    assert own_stack.history(run.id)[-3:] == STARTED_AGAIN
    assert suspended.history()[-1] == "Suspended", "which was silent for longer"
    own_stack.up()
    assert automations.faults(own_stack.api_url) == [], "`rlhf up` has put back what the test had changed"
    wait_for(lambda: len(run.starts()) == 2, "the second start", timeout_s=90)
    run.let_go()
    run.await_state("COMPLETED")


@pytest.mark.stack
def test_a_run_that_is_lost_with_its_worker_goes_on_after_up_and_one_that_down_ends_does_not(
    own_stack: LocalStack, tmp_path: Path
) -> None:
    run = WaitingRun(own_stack, tmp_path)
    run.await_start(1)
    psutil.Process(own_stack.pids()["worker"]).kill()
    run.kill(1)
    own_stack.up()
    wait_for(lambda: len(run.starts()) == 2, "the second start", timeout_s=120)
    crashed = own_stack.start_run("waiting/waiting", directory=str(tmp_path))
    wait_for(lambda: len(run.starts()) == 3, "the start of another run", timeout_s=90)
    os.kill(run.starts()[2][0], signal.SIGKILL)
    wait_for(lambda: own_stack.history(crashed)[-1] == RESTARTING, "the other run's crash", timeout_s=30)
    own_stack.down()
    with turn(), usual_ports_occupied():  # it keeps off them, as it did before
        own_stack.up()
    for each in (run.id, crashed):
        assert own_stack.run_state(each) == "CRASHED"
    wait_for(lambda: automations.faults(own_stack.api_url) == [], "the automations", timeout_s=1)
    assert {own_stack.history(each)[-1] for each in (run.id, crashed)} == {"Crashed"}

"""One process works on a run, whoever was stopped or killed, and one run at a time on a deployment that asks for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import psutil
import pytest

from infra.artifacts.locks import RUN_LOCK
from infra.errors import ServiceError
from infra.services import automations
from infra.services.automations import RESTARTING
from tasks.one_process import SKIPPED
from tests.integration.local_stack import TINY_FLOWS, LocalStack, wait_for
from tests.integration.waiting_run import WaitingRun, stopped
from tests.unit.artifacts.lock_contract import elsewhere

pytestmark = [pytest.mark.integration, pytest.mark.stack]

LOST_AFTER_S, QUIET_S = 45.0, 10.0
"""Stand for the 1200 s and 30 s of every day: flows say every 30 s that they live."""


class WorkingRun(WaitingRun):
    """A run that works until it is let go, and what its processes wrote down."""

    def __init__(self, stack: LocalStack, directory: Path, deployment: str = "working") -> None:
        super().__init__(stack, directory, flow="working", deployment=deployment)

    def workers(self) -> list[int]:
        """Return the processes that worked, in turn: one that is there twice worked beside another."""
        return [int(process) for process, _ in groupby((self.directory / "work").read_text().split())]

    def at_work(self) -> int:
        """Return the process of the newest start, once it works."""
        wait_for(self.starts, f"run {self.id} to start", timeout_s=120)
        process = self.starts()[-1][0]
        wait_for((self.directory / "work").exists, "the work to begin", timeout_s=60)
        wait_for(lambda: self.workers()[-1] == process, "the work to go on", timeout_s=60)
        return process

    def kill_at_work(self) -> None:
        os.kill(self.at_work(), signal.SIGKILL)

    def await_state(self, *names: str, timeout_s: float = 120.0) -> None:
        """Wait until the run's state has one of the names."""

        def is_one() -> bool:
            with suppress(ServiceError):  # a server that was stopped, or is busy, is asked again
                return self.history()[-1] in names
            return False

        wait_for(is_one, f"run {self.id} to be {names}", timeout_s=timeout_s)

    def await_second_start(self, number: int = 2) -> None:
        """Wait until a further start has found the first at work, and says so."""
        wait_for(lambda: self.said("works on this run and lives") >= number - 1, "the next start", timeout_s=180)

    def said(self, words: str, *, inside: bool = False) -> int:
        """Return how many lines of the run's log, or of its subflow's, have the words."""
        where = self.stack.children(self.id)[0]["id"] if inside else self.id
        return sum(words in line for line in self.stack.log(where))

    def engines(self) -> list[int]:
        """Return the processes of the run that are there, those that only wait among them."""
        found = []
        for process in self.stack.processes_of(self.id):
            with suppress(psutil.Error):  # one that has just ended
                found += [process.pid] if "prefect.engine" in process.cmdline() else []
        return found

    def await_end(self) -> None:
        """Wait until no process of the run is left, and the worker has had its say on the last."""
        wait_for(lambda: not self.engines(), "the processes of the run to end", timeout_s=60)


@pytest.fixture(scope="module")
def own(own_stack: LocalStack) -> Iterator[LocalStack]:
    """A stack whose server and worker may be stopped, and that takes a run for lost after less than a minute."""
    own_stack.deploy_tiny_flows(TINY_FLOWS, "working.yaml")
    automations.install(own_stack.api_url, automations.wanted(lost_after_s=LOST_AFTER_S, quiet_s=QUIET_S))
    yield own_stack
    automations.install(own_stack.api_url)


def sleep_through(stack: LocalStack, run: WorkingRun) -> int:
    """Stop worker and flow for longer than a run may be silent, as a server elsewhere sees a machine that sleeps.

    A server that slept with them knows it, and takes nobody for lost (`test_event_ordering.py`).

    Returns:
        The flow's process.
    """
    process = run.at_work()
    with stopped(process, stack.pids()["worker"]):
        time.sleep(LOST_AFTER_S + 15)  # the time itself is what is tried
    return process


def test_a_run_that_slept_with_its_worker_is_worked_on_by_one_process(own: LocalStack, tmp_path: Path) -> None:
    run = WorkingRun(own, tmp_path / "run")
    process = sleep_through(own, run)
    run.await_second_start()
    assert RESTARTING in run.history()
    assert len(run.engines()) == 2, "the second start waits beside the first"
    run.let_go()
    run.await_state("Completed")
    run.await_end()
    assert run.history()[-2:] == ["Running", "Completed"]
    assert run.starts() == [(process, 1)]
    assert run.workers() == [process]
    assert run.said("has come to its end (completed)") == 1


def test_a_process_whose_run_another_machine_has_taken_over_leaves_and_commits_nothing(
    own: LocalStack, tmp_path: Path
) -> None:
    run = WorkingRun(own, tmp_path / "run")
    first, lock = run.at_work(), own.store(tmp_path / "cache").lock(f"{RUN_LOCK}{run.id}")
    while not lock.swap(lock.look(), elsewhere(run.id)):  # it may count just now
        time.sleep(0.1)
    run.await_end()
    assert run.said("this process leaves the run: this process was silent", inside=True) == 1
    worked = len((run.directory / "work").read_text())
    assert run.history()[-1] == "Running", "nobody told the server anything"
    wait_for(lambda: len(run.starts()) == 2, "a start that takes over from the silent one", timeout_s=400)
    second = run.at_work()
    assert len((run.directory / "work").read_text()) > worked
    run.let_go()
    run.await_state("Completed")
    assert run.workers() == [first, second]


def test_the_second_start_goes_on_if_the_first_dies_after_all(own: LocalStack, tmp_path: Path) -> None:
    run = WorkingRun(own, tmp_path / "run")
    first = sleep_through(own, run)
    run.await_second_start()
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: len(run.starts()) == 2, "the second start to go on", timeout_s=60)
    second = run.at_work()
    run.let_go()
    run.await_state("Completed")
    run.await_end()
    assert run.workers() == [first, second]
    assert run.history()[-1] == "Completed"


def test_a_run_that_ends_before_it_is_started_again_is_not_started_again(own: LocalStack, tmp_path: Path) -> None:
    run = WorkingRun(own, tmp_path / "run")
    process = run.at_work()
    own.set_state(run.id, "CRASHED")
    run.await_state(RESTARTING)
    run.let_go()
    run.await_state("Completed")
    run.await_end()
    other = WorkingRun(own, tmp_path / "other")  # later than the restart would be
    other.kill_at_work()
    wait_for(lambda: len(other.starts()) == 2, "another run's restart", timeout_s=120)
    other.let_go()
    other.await_state("Completed")
    assert run.history()[-2:] == [RESTARTING, "Completed"]
    assert run.starts() == [(process, 1)]


def test_a_run_that_has_done_its_work_is_not_done_again_and_says_so(own: LocalStack, tmp_path: Path) -> None:
    run = WorkingRun(own, tmp_path / "run")
    run.let_go()
    run.await_state("Completed")
    own.set_state(run.id, "SCHEDULED")  # as when its end could not be reported
    wait_for(lambda: run.said("has done its work already"), "the second start", timeout_s=120)
    run.await_state("Completed")
    assert len(run.starts()) == 1


def test_of_a_deployment_that_takes_one_run_at_a_time_another_is_skipped_while_one_waits_for_its_restart(
    own: LocalStack, tmp_path: Path
) -> None:
    first = WorkingRun(own, tmp_path / "first", "alone")
    first.at_work()
    beside = WorkingRun(own, tmp_path / "beside", "alone")
    beside.await_state(SKIPPED)
    # the quiet time ends well before the run would be lost: a restart in that moment would crash again, uncounted
    slower = automations.wanted(lost_after_s=4 * LOST_AFTER_S, quiet_s=3 * QUIET_S)
    automations.install(own.api_url, slower)
    first.kill_at_work()
    first.await_state(RESTARTING)
    meanwhile = WorkingRun(own, tmp_path / "meanwhile", "alone")
    meanwhile.await_state(SKIPPED)
    wait_for(lambda: len(first.starts()) == 2, "the restart of the first", timeout_s=120)
    assert max(meanwhile.times(SKIPPED)) < first.scheduled_again_at(), "the first still waited for its restart"
    automations.install(own.api_url, automations.wanted(lost_after_s=LOST_AFTER_S, quiet_s=QUIET_S))
    first.let_go()
    first.await_state("Completed")
    for skipped in (beside, meanwhile):
        assert own.run_state(skipped.id) == "CANCELLED"
        assert skipped.starts() == []
        assert own.message(skipped.id).startswith("skipped: the run '")
        assert "is not done yet, and the deployment has one run at a time" in own.message(skipped.id)
    later = WorkingRun(own, tmp_path / "later", "alone")
    later.let_go()
    later.await_state("Completed")


@pytest.mark.parametrize("fate", ["cancelled", "deleted", "failed"])
def test_a_deployment_is_free_once_its_run_is_over_for_good(own: LocalStack, tmp_path: Path, fate: str) -> None:
    first = WorkingRun(own, tmp_path / "first", "alone")
    process = first.at_work()
    if fate == "cancelled":
        own.cancel(first.id)
    elif fate == "failed":
        own.set_state(first.id, "FAILED")
        os.kill(process, signal.SIGKILL)
    else:
        own.delete_run(first.id)
        os.kill(process, signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(process), "the first run's process to end", timeout_s=60)
    later = WorkingRun(own, tmp_path / "later", "alone")
    later.let_go()
    later.await_state("Completed")

"""One process for a run, whatever the server believes of it, and one run at a time where a deployment asks for it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from infra.process_record import ProcessRecord
from infra.services.automations import RESTARTING
from tests.integration.local_stack import TINY_FLOWS, LocalStack, wait_for
from tests.integration.waiting_run import WaitingRun

pytestmark = pytest.mark.integration


class AloneRun(WaitingRun):
    """A run whose every process takes the run's lock before it works."""

    def __init__(self, stack: LocalStack, directory: Path) -> None:
        super().__init__(stack, directory, flow="alone")

    def start_again(self) -> None:
        """Have it started a second time, as the server does that takes its process for dead."""
        self.stack.set_state(self.id, "CRASHED")
        self.stack.set_state(self.id, "SCHEDULED")

    def await_second(self) -> int:
        """Wait until a second process waits for the first, and return its id."""
        first = self.starts()[0][0]

        def waits() -> bool:
            return any("this one waits for its end" in line for line in self.stack.log(self.id))

        wait_for(waits, "the second process to say that it waits", timeout_s=90)
        engines = [each.pid for each in self.stack.processes_of(self.id) if "prefect.engine" in each.cmdline()]
        [second] = [pid for pid in engines if pid != first]
        return second


@pytest.fixture(scope="module")
def alone(stack: LocalStack) -> LocalStack:
    stack.deploy_tiny_flows(TINY_FLOWS, "alone.yaml")
    return stack


def test_a_second_process_of_a_run_waits_for_the_first_which_was_stopped_and_leaves_its_end_as_it_is(
    alone: LocalStack, tmp_path: Path
) -> None:
    run = AloneRun(alone, tmp_path)
    run.await_start(1)
    first = run.starts()[0][0]
    os.kill(first, signal.SIGSTOP)
    run.start_again()
    second = ProcessRecord.of(run.await_second())
    os.kill(first, signal.SIGCONT)
    run.let_go()
    wait_for(lambda: second.process() is None, "the second process to end", timeout_s=60)
    assert alone.run_state(run.id) == "COMPLETED"
    assert alone.message(run.id) == "made a policy"
    assert run.starts() == [(first, 1)]


def test_a_second_process_goes_on_where_the_first_is_killed(alone: LocalStack, tmp_path: Path) -> None:
    run = AloneRun(alone, tmp_path)
    run.await_start(1)
    first = run.starts()[0][0]
    run.start_again()
    second = run.await_second()
    run.kill(1)
    run.await_start(2)
    assert run.starts() == [(first, 1), (second, 2)]
    run.let_go()
    run.await_state("COMPLETED")


def test_a_process_that_only_waits_passes_on_the_word_to_end(alone: LocalStack, tmp_path: Path) -> None:
    run = AloneRun(alone, tmp_path)
    run.await_start(1)
    first = ProcessRecord.of(run.starts()[0][0])
    run.start_again()
    os.kill(run.await_second(), signal.SIGTERM)  # as the worker does for a run that is cancelled
    wait_for(lambda: first.process() is None, "the process that worked to end, too", timeout_s=60)
    alone.set_state(run.id, "CANCELLED")


def test_a_run_that_is_due_while_another_works_or_waits_to_be_started_again_is_skipped_with_a_sentence(
    alone: LocalStack, tmp_path: Path
) -> None:
    run = AloneRun(alone, tmp_path)
    run.await_start(1)
    skipped = alone.start_run("alone/alone", directory=str(tmp_path))
    wait_for(lambda: alone.run_state(skipped) == "CANCELLED", "the run beside it to be skipped", timeout_s=60)
    assert alone.history(skipped)[-1] == "Skipped"
    said = alone.message(skipped)
    assert said.startswith("skipped: the run ")
    assert "of the same deployment goes on since" in said
    assert said.endswith(f"if it is stuck, end it with `prefect flow-run cancel {run.id}`")
    run.kill(1)
    wait_for(lambda: alone.history(run.id)[-1] == RESTARTING, "the crash to be noticed", timeout_s=60)
    late = alone.start_run("alone/alone", directory=str(tmp_path))  # due in the quiet half minute
    wait_for(
        lambda: alone.run_state(late) == "CANCELLED", "the run in the quiet half minute to be skipped", timeout_s=60
    )
    run.await_start(2)
    run.let_go()
    run.await_state("COMPLETED")
    assert [number for _, number in run.starts()] == [1, 2]
    after = alone.start_run("alone/alone", directory=str(tmp_path))
    wait_for(lambda: alone.run_state(after) == "COMPLETED", "the next run to work", timeout_s=60)

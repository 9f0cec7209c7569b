"""The Prefect server is killed, and away for a while: runs whose process lives go on, all others start again, once."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from infra.services import automations, prefect_api
from infra.services.automations import RESTARTING
from infra.services.prefect_yaml import read_prefect_yaml
from infra.settings import CHECKOUT
from tests.integration.local_stack import TINY_FLOWS, LocalStack
from tests.integration.waiting_run import ONE_START, STARTED_AGAIN, WaitingRun

pytestmark = [pytest.mark.integration, pytest.mark.stack]

NIGHTLY = "pipeline/nightly"
RESTART_S = 60.0
"""From the server's return until a run whose process is gone runs anew."""
AGES_S = (290.0, 60.0, 10.0)
"""How long runs have been running when the server is killed: Prefect links states that lie less than 300 s apart."""
CRASH_S = 8.0
"""From the death of a process until its run is Crashed, or a little longer."""


def kill_server(stack: LocalStack) -> None:
    """End the server as a power cut does."""
    server = psutil.Process(stack.pids()["server"])
    server.kill()
    server.wait(timeout=10)


def die(run: WaitingRun) -> None:
    """Kill a run's process, which nobody but its worker notices."""
    os.kill(run.starts()[-1][0], signal.SIGKILL)


@dataclass
class Runs:
    """What runs beside one another while the server is killed twice."""

    asking: WaitingRun
    """Calls the server at every step, of which one comes each second."""
    silent: WaitingRun
    """Does not call it at all."""
    ending: WaitingRun
    """Ends while it is away."""
    dying: WaitingRun
    """Its process is killed while it is away."""
    crashed: WaitingRun
    """Its process is killed just before: the server knows, and dies before anything follows from it."""
    cancelled: WaitingRun
    """A person has cancelled it just before."""
    taken: WaitingRun
    """A worker has just taken it, and it has not begun."""
    due: WaitingRun
    """Its time comes while the server is away."""

    def all(self) -> list[WaitingRun]:
        return list(vars(self).values())


@pytest.fixture(scope="module")
def runs(own_stack: LocalStack, warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs that have lived through a server that was killed, away, and killed again while crashes were pending."""
    stack, directory = own_stack, tmp_path_factory.mktemp("runs")

    def start(name: str, flow: str = "waiting") -> WaitingRun:
        return WaitingRun(stack, directory / name, flow=flow)

    with stack.forked_flows(warm):  # six at once; those that are started again start as in production
        begun = {name: start(name, "riding") for name in ("asking", "dying")}
        begun |= {name: start(name) for name in ("silent", "ending", "crashed", "cancelled")}
        for run in begun.values():
            run.await_starts(1)
    due = WaitingRun(stack, directory / "due", due_in_s=8)
    taken = start("taken")
    made = Runs(**begun, taken=taken, due=due)
    taken.await_name("Pending")
    die(made.crashed)
    body = {"state": {"type": "CANCELLING"}}
    prefect_api.call(stack.api_url, "POST", f"/flow_runs/{made.cancelled.id}/set_state", body)
    made.crashed.await_name("Crashed")
    kill_server(stack)
    die(made.dying)
    made.ending.let_go()
    steps = len(list(made.asking.directory.glob("step-*")))
    time.sleep(15)  # the server is away: longer than all that a client of Prefect's does about it at once
    assert len(list(made.asking.directory.glob("step-*"))) <= steps + 1, "the run waits for the server"
    stack.up()
    for run in (made.crashed, made.dying):
        run.await_name(RESTARTING)
    kill_server(stack)
    stack.up()
    for run in (made.crashed, made.dying):
        run.await_starts(2, timeout_s=RESTART_S)
    for run in (taken, due):
        run.await_starts(1, timeout_s=RESTART_S)
    for run in made.all():
        run.let_go()
    for run in made.all():
        run.await_state("COMPLETED", "CANCELLED", timeout_s=120)
    return made


def test_a_run_that_calls_the_server_all_the_while_waits_and_goes_on(runs: Runs) -> None:
    assert runs.asking.history() == ["Scheduled", *ONE_START, "Completed"]
    assert [number for _, number in runs.asking.starts()] == [1]
    assert runs.asking.run_count() == 1


def test_what_it_has_told_the_server_is_there_once(own_stack: LocalStack, runs: Runs) -> None:
    steps = len(list(runs.asking.directory.glob("step-*")))
    children = own_stack.children(runs.asking.id)
    assert {child["state_type"] for child in children} == {"COMPLETED"}
    assert len(children) == steps


@pytest.mark.parametrize("name", ["silent", "ending", "taken", "due"])
def test_a_run_whose_process_lives_or_begins_later_begins_once(runs: Runs, name: str) -> None:
    run: WaitingRun = getattr(runs, name)
    assert [number for _, number in run.starts()] == [1]
    assert run.run_count() == 1
    assert run.history()[-1] == "Completed"
    assert "Crashed" not in run.history()


@pytest.mark.parametrize("name", ["dying", "crashed"])
def test_a_run_whose_process_is_gone_starts_again_once(runs: Runs, name: str) -> None:
    run: WaitingRun = getattr(runs, name)
    assert [number for _, number in run.starts()] == [1, 2]
    assert run.run_count() == 2
    without_repetition = [
        state for state, before in zip(run.history(), ["", *run.history()], strict=False) if state != before
    ]
    told = [f"{state['timestamp']} {state['name']}: {state['message']}" for state in run.stack.states(run.id)]
    assert without_repetition == ["Scheduled", *ONE_START, *STARTED_AGAIN, *ONE_START, "Completed"], "\n".join(told)


def test_a_run_that_was_being_cancelled_is_cancelled(own_stack: LocalStack, runs: Runs) -> None:
    assert own_stack.run_state(runs.cancelled.id) == "CANCELLED"
    assert len(runs.cancelled.starts()) == 1
    assert own_stack.processes_of(runs.cancelled.id) == []


def test_a_run_is_cancelled_as_ever_after_the_server_was_away(
    own_stack: LocalStack, runs: Runs, tmp_path: Path
) -> None:
    del runs  # the worker has lived through it
    run = WaitingRun(own_stack, tmp_path)
    run.await_start(1)
    own_stack.cancel(run.id)
    assert own_stack.run_state(run.id) == "CANCELLED"


@pytest.fixture(scope="module")
def nightly(own_stack: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Deployments, each with a flow, that have the tags of the product's nightly one: one run of each at a time."""
    kept = read_prefect_yaml(CHECKOUT)[NIGHTLY].model_dump(mode="json", include={"tags", "work_pool"})
    flows = ["riding", "riding", "waiting"] * len(AGES_S)
    found = [
        {**kept, "name": f"nightly-{number}", "entrypoint": f"{flow}.py:{flow}"} for number, flow in enumerate(flows)
    ]
    file = tmp_path_factory.mktemp("nightly") / "nightly.yaml"
    file.write_text(json.dumps({"deployments": found}))
    own_stack.deploy_tiny_flows(TINY_FLOWS, str(file))
    return [(flow, each["name"]) for flow, each in zip(flows, found, strict=True)]


def start_at_ages(
    stack: LocalStack, deployments: Iterable[tuple[str, str]], directory: Path
) -> tuple[list[list[WaitingRun]], float]:
    """Start three runs for each age; return them by their place in the three, and when the first is at its age."""
    runs, following, due, cold_s = [list[WaitingRun]() for _ in range(3)], iter(deployments), time.time(), 0.0
    for age in AGES_S:
        time.sleep(max(0.0, due - age - cold_s - time.time()))
        began = time.time()
        for those in runs:
            flow, name = next(following)
            those.append(WaitingRun(stack, directory / name, flow=flow, deployment=name))
        for those in runs:
            those[-1].await_starts(1)
        if age == AGES_S[0]:
            due, cold_s = runs[0][0].began_at() + age, time.time() - began
    return runs, due


@pytest.mark.outages
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("down_s", [60.0, 240.0, 480.0])
def test_whenever_the_server_is_killed_and_however_long_it_is_away(
    own_stack: LocalStack,
    nightly: list[tuple[str, str]],
    tmp_path: Path,
    down_s: float,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nine runs side by side: of each age one that lives, one that dies meanwhile, and one that died just before."""
    (living, dying, crashed), due = start_at_ages(own_stack, nightly, tmp_path)
    time.sleep(max(0.0, due - CRASH_S - time.time()))
    for run in crashed:
        die(run)
    for run in crashed:
        run.await_name("Crashed")
    ages = [time.time() - run.began_at() for run in living]
    kill_server(own_stack)
    assert AGES_S[0] - CRASH_S < ages[0] < 300, "this machine is too slow or busy for runs of these ages"
    time.sleep(down_s / 2)
    for run in dying:
        die(run)
    time.sleep(down_s / 2)
    assert "worker" in own_stack.pids(), "the worker waits for its server"
    own_stack.up()
    back = psutil.Process(own_stack.pids()["server"]).create_time()
    for run in (*dying, *crashed):
        run.await_starts(2)  # six cold starts on what may be two cores
    took_s = [run.scheduled_again_at() - back for run in (*dying, *crashed)]
    with capsys.disabled():
        print(  # noqa: T201
            f" runs of {', '.join(f'{age:.0f}' for age in ages)} s, away {down_s:.0f} s, started again "
            f"{', '.join(f'{each:.0f}' for each in took_s)} s after its start ",
            end="",
        )
    assert max(took_s) <= RESTART_S
    for run in (*living, *dying, *crashed):
        run.let_go()
    for run in (*living, *dying, *crashed):
        run.await_state("COMPLETED", timeout_s=120)
    assert [run.run_count() for run in living] == [1, 1, 1]
    assert [run.run_count() for run in (*dying, *crashed)] == [2] * 6
    assert [len(run.starts()) for run in (*living, *dying, *crashed)] == [1, 1, 1, *[2] * 6]
    assert automations.faults(own_stack.api_url) == []

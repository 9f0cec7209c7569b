"""What passes is tried again and then leaves the run to be started again; what is final does not; what shows warns."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.services import prefect_api
from infra.services.automations import RESTARTING
from tests.integration.behind_proxies import behind, start_with
from tests.integration.flaky_proxy import FlakyProxy
from tests.integration.local_stack import TINY_FLOWS, LocalStack, wait_for
from tests.integration.waiting_run import ONE_START

pytestmark = pytest.mark.integration

PATIENCE_S = 3


@pytest.fixture(scope="module")
def deployed(stack: LocalStack) -> LocalStack:
    stack.deploy_tiny_flows(TINY_FLOWS, "failing.yaml")
    return stack


def start(
    stack: LocalStack, directory: Path, meets: str, *, store: FlakyProxy, server: FlakyProxy | None = None
) -> str:
    """Start a run that reaches the store, and perhaps the server, through a proxy; return its id."""
    env = {**behind(stack, store=store, server=server), "RLHF_STORE_PATIENCE_S": str(PATIENCE_S)}
    return start_with(stack, "failing/failing", env, directory=str(directory), meets=meets)


def await_end(stack: LocalStack, run: str) -> None:
    wait_for(lambda: stack.is_over(run), "the run's end", timeout_s=180)


def messages(stack: LocalStack, run: str) -> dict[str, str]:
    """Return what the last state of each name says."""
    states = prefect_api.call(stack.api_url, "GET", f"/flow_run_states/?flow_run_id={run}")
    return {str(state["name"]): str(state["message"]) for state in states}


def starts(directory: Path) -> list[int]:
    """Return the number of the run's start, for each attempt of its task."""
    return [int(line) for line in (directory / "attempts").read_text().splitlines()]


@pytest.mark.stack
def test_a_store_that_is_away_too_long_crashes_a_run_which_goes_on_when_it_is_back(
    deployed: LocalStack, store_proxy: FlakyProxy, tmp_path: Path
) -> None:
    store_proxy.leave()
    run = start(deployed, tmp_path, "store", store=store_proxy)
    wait_for(lambda: RESTARTING in deployed.history(run), "the run to be waiting for its restart", timeout_s=120)
    said = messages(deployed, run)["Crashed"]
    assert said.startswith(f"the S3 server {store_proxy.url} did not answer within {PATIENCE_S} s while looking around")
    assert said.endswith("; this was start 1 of 4, and the next goes on from the last commit")
    assert [child["state_type"] for child in deployed.children(run)] == ["CRASHED"]
    store_proxy.come_back()
    await_end(deployed, run)
    again = [*ONE_START, "Crashed", RESTARTING, "Scheduled", *ONE_START, "Completed"]
    assert deployed.history(run) == ["Scheduled", *again]
    assert len(starts(tmp_path)) == 2, "the store was waited for once: its task was not tried again within a run"
    assert any("did not answer within" in line for line in deployed.log(run))


@pytest.mark.stack
def test_a_store_that_is_away_for_a_while_is_waited_for_and_the_runs_log_says_so(
    deployed: LocalStack, store_proxy: FlakyProxy, tmp_path: Path
) -> None:
    store_proxy.leave()
    env = behind(deployed, store=store_proxy)
    run = start_with(deployed, "failing/failing", env, directory=str(tmp_path), meets="store")

    def told() -> list[str]:
        logs = [deployed.log(child["id"]) for child in deployed.children(run)]
        return [line for log in logs for line in log if "looking around" in line]

    wait_for(told, "the line that the store is away", timeout_s=120)
    store_proxy.come_back()
    await_end(deployed, run)
    assert deployed.history(run) == ["Scheduled", *ONE_START, "Completed"]
    assert starts(tmp_path) == [1]
    wait_for(lambda: len(told()) == 2, "the line that it answers again")


def test_what_is_final_stops_a_run_at_once_with_its_sentence(
    deployed: LocalStack, store_proxy: FlakyProxy, tmp_path: Path
) -> None:
    run = start(deployed, tmp_path, "bad data", store=store_proxy)
    await_end(deployed, run)
    assert deployed.history(run) == ["Scheduled", *ONE_START, "Refused: data"]
    assert [(child["state_type"], child["state_name"]) for child in deployed.children(run)] == [
        ("FAILED", "Refused: data")
    ]
    assert deployed.message(run) == "row 3 of rows.jsonl has no answer"
    assert starts(tmp_path) == [1]
    wait_for(lambda: not deployed.processes_of(run), "the end of its process, which sends its last lines")
    assert not [line for line in deployed.log(run) if "Traceback" in line]


@pytest.mark.parametrize(
    "meets", ["nobody who answers", pytest.param("a call that does not come back", marks=pytest.mark.stack)]
)
def test_a_stage_that_hangs_fails_at_its_deadline_with_a_sentence_and_leaves_no_process(
    deployed: LocalStack, tmp_path: Path, meets: str
) -> None:
    env = {"RLHF_STAGE_TIMEOUT_S": "1"}
    run = start_with(deployed, "failing/failing", env, directory=str(tmp_path), meets=meets)
    await_end(deployed, run)
    assert deployed.history(run) == ["Scheduled", *ONE_START, "Failed: not done in time"]
    assert [child["state_type"] for child in deployed.children(run)] == ["FAILED"]
    said = deployed.message(run)
    assert said.startswith("waited 1 s for the stage work to end, and it is still at tests/integration/tiny_flows/")
    assert said.endswith("(work); if it needs more time, raise RLHF_STAGE_TIMEOUT_S")
    assert starts(tmp_path) == [1]
    wait_for(lambda: not deployed.processes_of(run), "the end of its process", timeout_s=30)


@pytest.mark.stack
def test_a_cluster_without_room_is_asked_again_within_the_run(
    deployed: LocalStack, store_proxy: FlakyProxy, tmp_path: Path
) -> None:
    run = start(deployed, tmp_path, "no room", store=store_proxy)
    await_end(deployed, run)
    assert deployed.history(run) == ["Scheduled", *ONE_START, "Completed"]
    assert starts(tmp_path) == [1, 1, 1]


@pytest.mark.outages  # behind a proxy of the server, as test_outages.py
def test_a_run_whose_pages_the_server_does_not_take_warns_once_and_goes_on(
    deployed: LocalStack, store_proxy: FlakyProxy, server_proxy: FlakyProxy, tmp_path: Path
) -> None:
    server_proxy.answer_unavailable(rb"POST /api/artifacts/", times=1000)
    run = start(deployed, tmp_path, "nothing", store=store_proxy, server=server_proxy)
    await_end(deployed, run)
    assert deployed.history(run) == ["Scheduled", *ONE_START, "Completed"]
    assert server_proxy.count > 0
    [warning] = wait_for(
        lambda: [line for line in deployed.log(run) if line.startswith("a page in Prefect: ")], "the warning"
    )
    assert warning.startswith("a page in Prefect: not shown, and the run goes on without (")

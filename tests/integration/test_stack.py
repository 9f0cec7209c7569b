"""The local stack as its users meet it: it comes up whatever the ports, runs schedules, and goes without a trace."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.clusters import leftover_processes
from infra.services import prefect_api
from tests.integration.cluster_processes import wait_until_nothing_is_left
from tests.integration.local_stack import LocalStack, read_json, run_local_stack, wait_for

pytestmark = pytest.mark.integration

MANY_WRITERS = """
import asyncio
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.states import Completed, Pending, Running, Scheduled

@flow
def many_writers(): ...

async def write():
    async with get_client() as client:
        for _ in range(8):
            run = await client.create_flow_run(many_writers, state=Scheduled())
            for state in (Pending(), Running(), Completed()):
                await client.set_flow_run_state(run.id, state)
            print(run.id)

async def main():
    await asyncio.gather(*(write() for _ in range(3)))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def own_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A stack whose services may be killed."""
    with run_local_stack(tmp_path_factory.mktemp("own")) as running:
        running.deploy_tiny_flows()
        yield running


def kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()
        process.wait(timeout=20)


def up(stack: LocalStack) -> str:
    result = stack.type("rlhf", "up")
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_occupied_ports_are_replaced_by_free_ones(stack: LocalStack) -> None:
    addresses = {stack.state.services[name].address for name in ("server", "store")}
    assert addresses.isdisjoint({"http://127.0.0.1:4200", "http://127.0.0.1:8333"})


def test_all_services_run_and_their_memory_is_reported(stack: LocalStack) -> None:
    result = stack.type("rlhf", "status", "--json")
    assert result.returncode == 0
    lines = {line["name"]: line for line in read_json(result)}
    for name in ("store", "server", "worker"):
        assert lines[name]["state"] == "running"
        assert lines[name]["memory_bytes"] > 2**20


def test_the_doctor_finds_nothing_wrong_with_a_running_stack(stack: LocalStack) -> None:
    findings = {each["name"]: each for each in read_json(stack.type("rlhf", "doctor", "--json"))}
    wrong = [each for each in findings.values() if each["verdict"] == "wrong" and each["name"] != "packages"]
    assert wrong == []
    assert findings["artifact store"]["seen"] == "s3://rlhf"


def test_the_prefect_command_finds_the_server_through_the_env_file(stack: LocalStack) -> None:
    result = stack.type("prefect", "deployment", "ls", cwd=stack.env_file.parent)
    assert result.returncode == 0, result.stderr
    for name in ("pipeline/quickstart", "pipeline/nightly", "ppo/llama7b", "reward-model/quickstart"):
        assert name in result.stdout


def test_secrets_stand_in_no_command_line_and_in_no_file_that_others_read(stack: LocalStack, tmp_path: Path) -> None:
    secret = (stack.home / "store.secret").read_text().strip()
    assert len(secret) >= 32
    run, manifest = stack.start_cluster_run(tmp_path)  # a run, a worker and a cluster that all know the secret
    tokens = [manifest.token.read_text()]
    try:
        for process in stack.processes():
            words = " ".join(process.cmdline())
            assert not [each for each in (secret, *tokens) if each in words]
        assert stack.holders_of(secret) == {"store.secret", "stack.env"}
    finally:
        stack.cancel(run)
    assert stack.holders_of(secret) == {"store.secret", "stack.env"}
    assert stack.holders_of(tokens[0]) == set()
    for name in ("logs", "clusters", "prefect"):
        assert [path for path in (stack.home / name).rglob("*") if path.is_file()], "there was something to look at"
    for name in ("store.secret", "stack.env"):
        assert (stack.home / name).stat().st_mode & 0o777 == 0o600
    assert stack.home.stat().st_mode & 0o777 == 0o700
    assert secret not in stack.env_file.read_text()


def test_a_cancelled_run_ends_cancelled_and_nothing_of_its_cluster_is_left(stack: LocalStack, tmp_path: Path) -> None:
    run, manifest = stack.start_cluster_run(tmp_path)
    before = stack.processes_of(run)
    assert before
    stack.cancel(run)
    assert stack.run_state(run) == "CANCELLED"
    wait_until_nothing_is_left(manifest)
    wait_for(lambda: not stack.processes_of(run), "the end of the run's processes", timeout_s=30)
    assert stack.pids().keys() == {"store", "server", "worker"}


def test_a_second_up_leaves_everything_as_it_is(stack: LocalStack) -> None:
    before = stack.pids()
    assert "starting" not in up(stack)
    assert stack.pids() == before


def test_two_ups_at_once_make_one_stack(stack: LocalStack) -> None:
    before = stack.pids()
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: stack.type("rlhf", "up").returncode, range(2)))
    assert results == [0, 0]
    assert stack.pids() == before


def test_a_run_finds_the_store_and_a_schedule_of_every_minute_runs_by_itself(stack: LocalStack) -> None:
    stack.deploy_tiny_flows()
    deployment = prefect_api.deployment(stack.api_url, "tiny/every-minute")
    assert deployment is not None

    def finished() -> list[dict[str, Any]]:
        where = {"deployments": {"id": {"any_": [deployment["id"]]}}}
        runs = prefect_api.call(stack.api_url, "POST", "/flow_runs/filter", where)
        return [run for run in runs if run["state_type"] not in {"SCHEDULED", "PENDING", "RUNNING"}]

    try:
        run = wait_for(finished, "a run of the schedule to finish", timeout_s=150)[0]
    finally:
        prefect_api.call(stack.api_url, "DELETE", f"/deployments/{deployment['id']}")
    assert (run["state_type"], run["auto_scheduled"]) == ("COMPLETED", True)


def test_the_server_loses_no_state_change_on_sqlite_with_many_writers(stack: LocalStack) -> None:
    # The worker's number of retries: sqlite has one writer, and the server sends the others away for a moment.
    variables = {"PREFECT_API_URL": stack.api_url, "PREFECT_CLIENT_MAX_RETRIES": "7"}
    result = stack.type(sys.executable, "-c", MANY_WRITERS, cwd=stack.home, **variables)
    assert result.returncode == 0, result.stderr
    runs = result.stdout.split()
    assert len(runs) == 24
    for run in runs:
        history = prefect_api.call(stack.api_url, "GET", f"/flow_run_states/?flow_run_id={run}")
        assert [state["type"] for state in history] == ["SCHEDULED", "PENDING", "RUNNING", "COMPLETED"]


@pytest.mark.parametrize("service", ["store", "server", "worker"])
def test_a_killed_service_is_started_again_by_the_next_up(own_stack: LocalStack, service: str) -> None:
    before = own_stack.pids()
    kill(psutil.Process(before[service]))
    status = own_stack.type("rlhf", "status", "--json")
    assert status.returncode == 1
    assert {line["name"]: line["state"] for line in read_json(status)}[service] == "died"
    up(own_stack)
    after = own_stack.pids()
    assert {name for name in after if after[name] != before[name]} == {service}
    assert prefect_api.deployment(own_stack.api_url, "tiny/tiny") is not None, "the server's data are still there"


def test_a_run_whose_processes_are_killed_does_not_count_as_running_for_ever(own_stack: LocalStack) -> None:
    run = own_stack.start_run("tiny/tiny", sleep_s=120)
    wait_for(lambda: own_stack.run_state(run) == "RUNNING", "the run to start")
    service_pids = {pid for name, pid in own_stack.pids().items() if name != "worker"}
    for process in own_stack.processes():
        if process.pid not in service_pids:
            kill(process)
    up(own_stack)
    assert own_stack.run_state(run) == "CRASHED"


def test_a_schedule_that_a_person_switched_on_stays_on_when_deployments_change(own_stack: LocalStack) -> None:
    before = prefect_api.deployment(own_stack.api_url, "pipeline/nightly")
    assert before is not None
    assert [schedule["active"] for schedule in before["schedules"]] == [False]
    path = f"/deployments/{before['id']}/schedules/{before['schedules'][0]['id']}"
    prefect_api.call(own_stack.api_url, "PATCH", path, {"active": True})
    state = own_stack.state
    state.deployed = "of another source"
    state.save(own_stack.home)
    assert "registering" in up(own_stack)
    after = prefect_api.deployment(own_stack.api_url, "pipeline/nightly")
    assert after is not None
    assert [schedule["active"] for schedule in after["schedules"]] == [True]


def test_down_ends_a_run_its_live_cluster_and_all_else_and_data_are_kept(own_stack: LocalStack, tmp_path: Path) -> None:
    run, manifest = own_stack.start_cluster_run(tmp_path)
    pids = [process.pid for process in own_stack.processes()]
    sockets = own_stack.state.socket_dir
    assert manifest.is_running
    result = own_stack.type("rlhf", "down")
    assert result.returncode == 0, result.stderr
    assert own_stack.processes() == leftover_processes(manifest.mark, manifest.head) == []
    assert [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"] == []
    assert not manifest.temp_dir.exists()
    assert not list((own_stack.home / "clusters").glob("*.json"))
    assert sockets is not None
    assert not sockets.exists()
    addresses = own_stack.state.ports
    up(own_stack)
    assert own_stack.state.ports == addresses
    assert own_stack.run_state(run) == "CRASHED"


def test_down_ends_a_cluster_whose_run_and_watchdog_were_killed(own_stack: LocalStack, tmp_path: Path) -> None:
    _, manifest = own_stack.start_cluster_run(tmp_path)
    kill(psutil.Process(manifest.watchdog_pid))
    kill(psutil.Process(manifest.owner.pid))
    result = own_stack.type("rlhf", "down")
    assert result.returncode == 0, result.stderr
    assert own_stack.processes() == leftover_processes(manifest.mark, manifest.head) == []
    assert not manifest.temp_dir.exists()
    assert not list((own_stack.home / "clusters").glob("*.json"))
    up(own_stack)


def test_a_run_is_followed_through_a_restart_of_the_server(own_stack: LocalStack, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with out.open("w") as said:
        command = ["rlhf", "run", "tiny/tiny", "-p", "sleep_s=10"]
        follower = subprocess.Popen(command, env=own_stack.environment, stdout=said, stderr=said, text=True)
        try:
            wait_for(lambda: "running" in out.read_text(), "the run to start")
            kill(psutil.Process(own_stack.pids()["server"]))
            up(own_stack)
            assert follower.wait(timeout=180) == 0, out.read_text()
        finally:
            follower.kill()
            follower.wait()
    assert out.read_text().splitlines()[-1] == "finished"


def test_the_run_command_refuses_in_one_sentence_what_the_deployment_does_not_take(own_stack: LocalStack) -> None:
    elsewhere = {"PREFECT_API_URL": "http://127.0.0.1:9/api"}  # exported for another server
    result = own_stack.type("rlhf", "run", "quickstart", "-p", "seed=many", **elsewhere)
    assert result.returncode == 1
    assert result.stderr.startswith("rlhf: pipeline/quickstart refuses: "), result.stderr
    assert "seed" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert f"the run goes to {own_stack.api_url}" in "".join(result.stdout.splitlines())


def test_a_service_that_cannot_start_is_told_with_its_log_and_nothing_is_left(tmp_path: Path) -> None:
    stack = LocalStack(tmp_path / "home", tmp_path / ".env")
    result = stack.type("rlhf", "up", RLHF_DATABASE_URL="postgresql+asyncpg://nobody@127.0.0.1:1/none")
    assert result.returncode == 1
    assert result.stderr.startswith("rlhf: the Prefect server ended while it started: ")
    assert str(stack.home / "logs" / "server.log") in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert stack.processes() == []
    assert stack.state.services == {}
    assert stack.state.socket_dir is None

"""The local stack as its users meet it: it comes up whatever the ports, keeps its secrets, and runs schedules."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from infra.clusters.actor_log import LINES
from infra.forked_flows import is_flow_server
from infra.services import prefect_api, runs
from tests.integration.cluster_processes import wait_until_nothing_is_left
from tests.integration.local_stack import LocalStack, read_json, wait_for

pytestmark = pytest.mark.integration

SOCKETS = 110
"""On sqlite the server takes a hundred requests at a time, and took each open socket for one."""

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

TALKING = """
import logging, os, signal, threading, warnings
from types import SimpleNamespace

import ray
from prefect import flow
from prefect.runtime import flow_run

from infra.clusters import connect
from infra.settings import settings
from rlhf_core.config import ClusterConfig
from tasks.clusters import end_cluster, lease_for
from tasks.task_errors import stage_task

log = logging.getLogger("rlhf_core.talker")

class Talker:
    def talk(self):
        log.info("the key is %s", os.environ["RLHF_S3_SECRET_KEY"])
        warnings.warn("careful")

    def flood(self):
        for number in range(5000):
            log.info("number %d", number)
        log.error("and an error")
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):  # says how many were left out
                thread.join()

    def die(self):
        log.info("goodbye")
        os.write(2, b"words of a library in C\\n")
        os.kill(os.getpid(), signal.SIGKILL)

@stage_task(name="talk")
def talk():
    context = SimpleNamespace(settings=settings())
    connect(lease_for("talking", ClusterConfig(), context, num_trainers=1, num_cpus=1, object_store_mb=80))
    actor = ray.remote(num_cpus=0)(Talker)
    trainer, maker = (actor.options(name=name).remote() for name in ("trainer", "maker-0"))
    ray.get(trainer.talk.remote(), timeout=120)
    ray.get(maker.talk.remote(), timeout=120)
    ray.get(maker.flood.remote(), timeout=120)
    try:
        ray.get(trainer.die.remote(), timeout=120)
    except ray.exceptions.RayActorError:
        pass

@flow
def talking():
    print(flow_run.id)
    try:
        talk()
    finally:
        end_cluster("talking")

talking()
"""


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


@pytest.mark.parametrize(
    ("job", "is_forked"), [({}, True), ({"env": {"PREFECT_LOGGING_LEVEL": "DEBUG"}}, False)], ids=["usual", "its own"]
)
def test_a_run_is_forked_unless_it_has_an_environment_of_its_own(
    stack: LocalStack, job: dict[str, Any], is_forked: bool
) -> None:
    assert stack.state.socket_dir is not None
    wait_for((stack.state.socket_dir / "flows").exists, "the server that flows are forked from", timeout_s=120)
    run = stack.start_run("pipeline/quickstart", job=job)
    try:
        [engine] = wait_for(
            lambda: [each for each in runs.engines(stack.state.id) if each.environ()["PREFECT__FLOW_RUN_ID"] == run],
            "the run's process",
        )
        watcher = engine.parent()
        assert watcher is not None
        assert is_flow_server(watcher) is is_forked
        assert engine.cmdline()[1:3] == ["-m", "prefect.engine"]
        wait_for(lambda: "RUNNING" in [each["type"] for each in stack.states(run)], "the run to begin")
    finally:
        stack.cancel(run)
    assert stack.run_state(run) == "CANCELLED"
    wait_for(lambda: not stack.processes_of(run), "the end of the run's processes", timeout_s=30)


@pytest.mark.stack
def test_secrets_stand_in_no_command_line_and_in_no_file_that_others_read(stack: LocalStack, tmp_path: Path) -> None:
    secret = (stack.home / "store.secret").read_text().strip()
    assert len(secret) >= 32
    run, record = stack.start_cluster_run(tmp_path)  # a run, a worker and a cluster that all know the secret
    tokens = [record.token.read_text()]
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
    run, record = stack.start_cluster_run(tmp_path)
    before = stack.processes_of(run)
    assert before
    stack.cancel(run)
    assert stack.run_state(run) == "CANCELLED"
    assert "Crashed" not in stack.history(run), "else it would be started again"
    wait_for(lambda: "Flow run was cancelled." in stack.log(run), "the run to say so: it was not killed", timeout_s=10)
    [child] = stack.children(run)
    wait_for(lambda: stack.run_state(child["id"]) == "CANCELLED", "the end of the run's child", timeout_s=10)
    wait_until_nothing_is_left(record)
    wait_for(lambda: not stack.processes_of(run), "the end of the run's processes", timeout_s=30)
    assert stack.pids().keys() == {"store", "server", "worker"}


@pytest.mark.stack
def test_a_cancelled_run_that_cannot_end_itself_is_killed_and_leaves_no_child_running(
    stack: LocalStack, tmp_path: Path
) -> None:
    run, record = stack.start_cluster_run(tmp_path)
    for each in stack.processes_of(run):
        if any(part.startswith("prefect.") for part in each.cmdline()):
            each.suspend()  # takes no notice of SIGTERM
    stack.cancel(run)
    assert stack.run_state(run) == "CANCELLED"
    [child] = stack.children(run)
    wait_for(lambda: stack.run_state(child["id"]) == "CANCELLED", "the end of the run's child", timeout_s=10)
    assert stack.history(child["id"]) == ["Pending", "Running", "Cancelled"]
    wait_until_nothing_is_left(record)


def test_a_second_up_leaves_everything_as_it_is(stack: LocalStack) -> None:
    before = stack.pids()
    assert "starting" not in stack.up()
    assert stack.pids() == before


def test_two_ups_at_once_make_one_stack(stack: LocalStack) -> None:
    before = stack.pids()
    assert stack.type("sh", "-c", "rlhf up & rlhf up && wait $!").returncode == 0
    assert stack.pids() == before


def test_what_actors_say_is_in_the_runs_log_in_order_and_bounded_also_what_a_killed_one_said_last(
    stack: LocalStack,
) -> None:
    result = stack.type(sys.executable, "-c", TALKING, cwd=stack.home, **stack.prefect_variables)
    assert result.returncode == 0, result.stderr
    where = {"logs": {"flow_run_id": {"any_": result.stdout.splitlines()[:1]}}, "sort": "TIMESTAMP_ASC", "limit": 200}

    def lines() -> list[tuple[int, str]]:
        found = prefect_api.call(stack.api_url, "POST", "/logs/filter", where)
        return [(each["level"], each["message"]) for each in found if ": " in each["message"]]

    def said(actor: str) -> list[tuple[int, str]]:
        return [(level, text.removeprefix(f"{actor}: ")) for level, text in lines() if text.startswith(f"{actor}: ")]

    wait_for(lambda: len(said("trainer")) >= 4, "what the actor said last")
    key, warning, *others = said("trainer")
    assert key == (logging.INFO, "the key is ***")
    assert warning[0] == logging.WARNING
    assert "UserWarning: careful" in warning[1]
    assert others == [(logging.INFO, "goodbye"), (logging.WARNING, "words of a library in C")]
    numbers = [text for _, text in said("maker-0") if text.startswith("number ")]
    assert numbers == [f"number {number}" for number in range(LINES - 1)], "beside its first line"
    assert said("maker-0")[-2:] == [
        (logging.ERROR, "and an error"),
        (logging.INFO, f"… {5000 - len(numbers)} lines were left out"),
    ]
    order = [text for _, text in lines()]
    assert order.index("trainer: the key is ***") < order.index("maker-0: the key is ***")
    assert order.index("maker-0: and an error") < order.index("trainer: goodbye")


def test_a_supervised_service_comes_back_and_outlives_its_supervisor(stack: LocalStack) -> None:
    before = stack.pids()
    with stack.supervised():
        psutil.Process(before["worker"]).kill()
        wait_for(lambda: stack.pids().get("worker") not in (None, before["worker"]), "another worker", timeout_s=120)
        wait_for(stack.works, "the stack to work", timeout_s=120, every_s=1)
    after = stack.pids()
    assert {name for name in after if after[name] != before[name]} == {"worker"}


def test_a_run_finds_the_store_and_a_schedule_runs_by_itself(stack: LocalStack) -> None:
    stack.deploy_tiny_flows(file="scheduled.yaml")
    deployment = prefect_api.deployment(stack.api_url, "tiny/often")
    assert deployment is not None

    def finished() -> list[dict[str, Any]]:
        where = {"deployments": {"id": {"any_": [deployment["id"]]}}}
        runs = prefect_api.call(stack.api_url, "POST", "/flow_runs/filter", where)
        return [run for run in runs if run["state_type"] not in {"SCHEDULED", "PENDING", "RUNNING"}]

    try:
        run = wait_for(finished, "a run of the schedule to finish", timeout_s=150)[0]
    finally:
        prefect_api.call(stack.api_url, "DELETE", f"/deployments/{deployment['id']}", timeout_s=60)
    assert (run["state_type"], run["auto_scheduled"]) == ("COMPLETED", True)


def test_the_server_loses_no_state_change_on_sqlite_with_many_writers(stack: LocalStack) -> None:
    # No retries: sqlite has one writer, and the server lets the others wait for their turn.
    variables = {**stack.prefect_variables, "PREFECT_CLIENT_MAX_RETRIES": "0"}
    result = stack.type(sys.executable, "-c", MANY_WRITERS, cwd=stack.home, **variables)
    assert result.returncode == 0, result.stderr
    runs = result.stdout.split()
    assert len(runs) == 24
    for run in runs:
        history = prefect_api.call(stack.api_url, "GET", f"/flow_run_states/?flow_run_id={run}")
        assert [state["type"] for state in history] == ["SCHEDULED", "PENDING", "RUNNING", "COMPLETED"]


def test_the_server_answers_beside_more_web_sockets_than_it_serves_requests_at_a_time(stack: LocalStack) -> None:
    url = f"{stack.api_url.replace('http', 'ws', 1)}/events/in"
    with ExitStack() as sockets:
        for _ in range(SOCKETS):
            line = sockets.enter_context(connect(url, subprotocols=[Subprotocol("prefect")], open_timeout=20))
            line.send(json.dumps({"type": "auth", "token": stack.password}))
            assert json.loads(line.recv(timeout=20))["type"] == "auth_success"
        found = prefect_api.call(stack.api_url, "POST", "/flow_runs/count", {}, timeout_s=20)
    assert isinstance(found, int)


def test_the_run_command_refuses_in_one_sentence_what_the_deployment_does_not_take(stack: LocalStack) -> None:
    elsewhere = {"PREFECT_API_URL": "http://127.0.0.1:9/api"}  # exported for another server
    result = stack.type("rlhf", "run", "quickstart", "-p", "seed=many", **elsewhere)
    assert result.returncode == 1
    assert result.stderr == 'rlhf: pipeline/quickstart: seed must be a whole number or null, but it is "many"\n'
    assert f"the run goes to {stack.api_url}" in "".join(result.stdout.splitlines())

    misspelt = stack.type("rlhf", "run", "quickstart", "-p", "epsiodes=3")
    assert misspelt.returncode == 1
    sentence = (
        "rlhf: pipeline/quickstart has no parameter 'epsiodes' (did you mean episodes?); its parameters are preset"
    )
    assert misspelt.stderr.startswith(sentence), misspelt.stderr
    assert len(misspelt.stderr.splitlines()) == 1


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

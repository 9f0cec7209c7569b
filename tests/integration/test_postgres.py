"""A stack whose Prefect server keeps its data in a PostgreSQL of the stack's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from infra.errors import ServiceError
from infra.process_record import is_live
from infra.services import postgres, prefect_api
from infra.services.runs import engines
from tests.integration.local_stack import LocalStack, read_json, running, wait_for
from tests.integration.test_stack import MANY_WRITERS
from tests.integration.waiting_run import WaitingRun

pytestmark = [pytest.mark.integration, pytest.mark.stack]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    directory = tmp_path_factory.mktemp("postgres")
    try:
        postgres.installation(directory / "home")
    except ServiceError as error:
        pytest.skip(str(error))
    (directory / ".env").write_text("RLHF_DATABASE=postgres\n")
    with running(LocalStack(directory / "home", directory / ".env")) as found:
        found.deploy_tiny_flows(file="resuming.yaml")
        yield found


def database(stack: LocalStack) -> psutil.Process:
    return psutil.Process(stack.pids()[postgres.NAME])


def runs_there(stack: LocalStack) -> set[str]:
    return {run["id"] for run in prefect_api.flow_runs(stack.api_url, {})}


def test_it_is_a_service_of_the_stack_that_listens_on_no_port(stack: LocalStack) -> None:
    lines = {line["name"]: line["state"] for line in read_json(stack.type("rlhf", "status", "--json"))}
    assert lines[postgres.NAME] == "running"
    findings = {each["name"]: each["verdict"] for each in read_json(stack.type("rlhf", "doctor", "--json"))}
    assert (findings["PostgreSQL"], findings[postgres.NAME]) == ("well", "well")
    members = [database(stack), *database(stack).children(recursive=True)]
    assert [line for process in members for line in process.net_connections("inet")] == []
    assert not (stack.home / "prefect" / "prefect.db").exists()


def test_it_loses_no_state_change_with_many_writers(stack: LocalStack) -> None:
    variables = {**stack.prefect_variables, "PREFECT_CLIENT_MAX_RETRIES": "0"}
    result = stack.type(sys.executable, "-c", MANY_WRITERS, cwd=stack.home, **variables)
    assert result.returncode == 0, result.stderr
    assert [stack.history(run) for run in result.stdout.split()] == [
        ["Scheduled", "Pending", "Running", "Completed"]
    ] * 24


def test_a_database_that_is_killed_is_started_again_and_has_lost_nothing(stack: LocalStack, tmp_path: Path) -> None:
    run = WaitingRun(stack, tmp_path)
    run.await_starts(1)
    before, known = stack.pids(), runs_there(stack)
    process = database(stack)
    process.kill()
    process.wait(timeout=10)
    lines = {line["name"]: line["state"] for line in read_json(stack.type("rlhf", "status", "--json"))}
    assert (lines[postgres.NAME], lines["server"]) == ("died", "not answering")
    stack.up()
    after = stack.pids()
    assert {name for name in after if after[name] != before[name]} == {postgres.NAME}
    assert known <= runs_there(stack)
    run.let_go()
    run.await_state("COMPLETED", timeout_s=120)
    assert run.run_count() == 1


def test_server_and_database_that_are_killed_at_once_come_back_with_all_runs(stack: LocalStack) -> None:
    known, before = runs_there(stack), stack.pids()
    for name in ("server", postgres.NAME):
        process = psutil.Process(before[name])
        process.kill()
        process.wait(timeout=10)
    stack.up()
    assert known <= runs_there(stack)


def test_another_database_is_told_and_the_former_one_keeps_its_runs(stack: LocalStack, tmp_path: Path) -> None:
    run = WaitingRun(stack, tmp_path)
    run.await_starts(1)
    refused = stack.type("rlhf", "up", RLHF_DATABASE="sqlite")
    assert refused.returncode == 1
    assert "1 flow run is at work, of which another database would not know" in refused.stderr
    run.let_go()
    run.await_state("COMPLETED", timeout_s=120)
    wait_for(lambda: not engines(stack.state.id), "the end of the run's process", timeout_s=60)
    known, former = runs_there(stack), database(stack)
    changed = stack.type("rlhf", "up", RLHF_DATABASE="sqlite")
    assert changed.returncode == 0, changed.stdout + changed.stderr
    assert f"of the former one are in {stack.home}/postgres" in "".join(changed.stdout.splitlines())
    assert not is_live(former)
    assert postgres.NAME not in stack.state.services
    assert known.isdisjoint(runs_there(stack))
    assert "prefect.db, and `rlhf up` with RLHF_DATABASE as it was" in " ".join(stack.up().split())
    assert known <= runs_there(stack)


def test_down_ends_it_as_it_wants_to_be_ended_and_leaves_no_socket(stack: LocalStack) -> None:
    process, sockets = database(stack), stack.state.socket_dir
    try:
        assert "ending the database" in stack.down()
        assert not is_live(process)
        assert "database system is shut down" in (stack.home / "logs" / "database.log").read_text()
        assert sockets is not None
        assert not sockets.exists()
    finally:
        stack.up()
    wait_for(lambda: postgres.answers(stack.state.services[postgres.NAME].address), "the database")

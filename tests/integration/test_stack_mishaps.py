"""The local stack in trouble: services, runs and clusters that are killed, and `down` in the midst of all."""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.clusters import leftover_processes
from infra.services import prefect_api, seaweed
from infra.services.ports import is_free
from infra.services.prefect_yaml import local_zone
from infra.services.runs import engines
from tests.integration.local_stack import (
    TINY_FLOWS,
    LocalStack,
    read_json,
    run_beside_usual_ports,
    turn,
    wait_for,
)

pytestmark = [pytest.mark.integration, pytest.mark.stack]


@pytest.fixture(scope="module")
def own_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A stack whose services may be killed; the usual ports were occupied when it came up, and no longer are."""
    with run_beside_usual_ports(tmp_path_factory.mktemp("own")) as running:
        running.deploy_tiny_flows()
        yield running


def kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()
        process.wait(timeout=20)


@pytest.mark.parametrize("service", ["store", "server", "worker"])
def test_a_killed_service_is_started_again_by_the_next_up(own_stack: LocalStack, service: str) -> None:
    before = own_stack.pids()
    kill(psutil.Process(before[service]))
    status = own_stack.type("rlhf", "status", "--json")
    assert status.returncode == 1
    assert {line["name"]: line["state"] for line in read_json(status)}[service] == "died"
    own_stack.up()
    after = own_stack.pids()
    assert {name for name in after if after[name] != before[name]} == {service}
    assert prefect_api.deployment(own_stack.api_url, "tiny/tiny") is not None, "the server's data are still there"


def test_the_server_deletes_runs_that_ended_long_ago_with_their_logs_and_pages(own_stack: LocalStack) -> None:
    def ended(days_ago: int) -> str:
        then = (datetime.now(UTC) - timedelta(days=days_ago)).isoformat()
        flow = prefect_api.call(own_stack.api_url, "POST", "/flows/", {"name": "tiny"})["id"]
        done = {"flow_id": flow, "state": {"type": "COMPLETED"}}
        made = prefect_api.call(own_stack.api_url, "POST", "/flow_runs/", done)
        run, name = made["id"], made["name"]
        with closing(sqlite3.connect(own_stack.home / "prefect" / "prefect.db", timeout=60)) as database, database:
            database.execute(
                "UPDATE flow_run SET end_time = ? WHERE name = ?", (then.replace("T", " ").removesuffix("+00:00"), name)
            )
        line = {"name": "tiny", "level": 20, "message": "a line", "timestamp": then, "flow_run_id": run}
        prefect_api.call(own_stack.api_url, "POST", "/logs/", [line])
        page = {"key": f"page-{days_ago}", "type": "markdown", "data": "a page", "flow_run_id": run}
        prefect_api.call(own_stack.api_url, "POST", "/artifacts/", page)
        return str(run)

    old, young = ended(91), ended(89)
    assert [own_stack.log(run) for run in (old, young)] == [["a line"], ["a line"]]
    kill(psutil.Process(own_stack.pids()["server"]))
    own_stack.up()  # a server looks when it begins, and then each hour
    gone = "the old run, its log and its page to be deleted"
    wait_for(lambda: not own_stack.log(old) and "page-91" not in own_stack.artifact_keys(), gone, timeout_s=120)
    assert prefect_api.call(own_stack.api_url, "GET", f"/flow_runs/{old}") is None
    assert own_stack.run_state(young) == "COMPLETED"
    assert own_stack.log(young) == ["a line"]
    assert "page-89" in own_stack.artifact_keys()


def test_what_the_store_notes_of_changes_is_deleted_and_it_works_on(own_stack: LocalStack, tmp_path: Path) -> None:
    def noted() -> str:
        return seaweed._shell("fs.ls /topics/.system/log\n", own_stack.home, own_stack.state.ports).strip()

    store = own_stack.store(tmp_path)
    store.commit("dataset", "noted", {"rows": b"1"})
    day = wait_for(noted, "the store to write down what it noted, as it does each minute", timeout_s=120)
    seaweed.purge_log(own_stack.home, own_stack.state.ports)
    assert noted() == day, "a week is kept"
    seaweed.purge_log(own_stack.home, own_stack.state.ports, kept_days=0)
    assert noted() == ""
    store.commit("dataset", "noted", {"rows": b"2"})
    assert len(store.list("dataset", "noted")) == 2


def test_a_run_whose_processes_are_killed_does_not_count_as_running_for_ever(own_stack: LocalStack) -> None:
    run = own_stack.start_run("tiny/tiny", sleep_s=120)
    wait_for(lambda: own_stack.run_state(run) == "RUNNING", "the run to start")
    service_pids = {pid for name, pid in own_stack.pids().items() if name != "worker"}
    for process in own_stack.processes():
        if process.pid not in service_pids:
            kill(process)
    own_stack.up()
    assert own_stack.run_state(run) == "CRASHED"


def test_a_run_that_a_killed_worker_had_taken_is_due_again_unless_it_has_a_process(own_stack: LocalStack) -> None:
    living = own_stack.start_run("tiny/tiny", sleep_s=30)
    wait_for(lambda: own_stack.run_state(living) == "RUNNING", "the run to start")
    kill(psutil.Process(own_stack.pids()["worker"]))
    taken = own_stack.start_run("tiny/tiny", sleep_s=0)
    for each in (living, taken):
        own_stack.set_state(each, "PENDING")  # so it still is while a process imports what it needs
    assert own_stack.up().count("had no process yet: it is due again") == 1
    for each in (living, taken):
        wait_for(lambda each=each: own_stack.run_state(each) == "COMPLETED", "the run to end", timeout_s=90)
    again = ["Pending", "Scheduled", "Pending", "Submitting", "Running", "Completed"]
    assert own_stack.history(taken) == ["Scheduled", *again]
    assert own_stack.history(living) == ["Scheduled", "Pending", "Submitting", "Running", "Pending", "Completed"]


def test_a_run_that_had_been_taken_is_due_again_after_up_itself_has_ended_the_worker(own_stack: LocalStack) -> None:
    run = own_stack.start_run("tiny/tiny", sleep_s=0, at="2100-01-01T00:00:00Z")
    for state in ("RUNNING", "PENDING"):  # it was started again after a crash
        own_stack.set_state(run, state)
    # The process of a run outlives its last state by a moment, and a worker that has one keeps its settings.
    wait_for(lambda: not engines(own_stack.state.id), "the former runs' processes to end", timeout_s=60)
    said = own_stack.type("rlhf", "up", RLHF_STORE_PATIENCE_S="899").stdout
    assert "the worker has new settings or another version: starting it anew" in said
    assert "had no process yet: it is due again" in said
    wait_for(lambda: own_stack.run_state(run) == "COMPLETED", "the run to end", timeout_s=90)


def test_down_ends_for_good_what_had_begun_and_a_run_that_had_not_is_due_after_the_next_up(
    own_stack: LocalStack,
) -> None:
    kill(psutil.Process(own_stack.pids()["worker"]))
    begun, taken = own_stack.start_run("tiny/tiny", sleep_s=0), own_stack.start_run("tiny/tiny", sleep_s=0)
    own_stack.set_state(begun, "RUNNING")
    for each in (begun, taken):
        own_stack.set_state(each, "PENDING")
    own_stack.down()
    own_stack.up()
    wait_for(lambda: own_stack.run_state(taken) == "COMPLETED", "the run to end", timeout_s=90)
    assert own_stack.run_state(begun) == "CRASHED"


def test_what_a_person_set_and_runs_that_wait_stay_when_deployments_change(own_stack: LocalStack) -> None:
    def nightly() -> dict[str, Any]:
        found = prefect_api.deployment(own_stack.api_url, "pipeline/nightly")
        assert found is not None
        return found

    def see() -> dict[str, Any]:
        found = nightly()
        schedules = [(each["slug"], each["schedule"], each["active"]) for each in found["schedules"]]
        kept = {name: found[name] for name in ("parameters", "tags", "job_variables", "paused", "description")}
        kept["limit"] = (found["global_concurrency_limit"] or {}).get("limit")
        return {**kept, "schedules": sorted(schedules, key=str)}

    before = nightly()
    [ours] = before["schedules"]
    assert ours["active"] is False
    assert ours["schedule"]["timezone"] == local_zone()
    path = f"/deployments/{before['id']}"
    prefect_api.call(own_stack.api_url, "PATCH", f"{path}/schedules/{ours['id']}", {"active": True})
    hourly = {"cron": "5 * * * *", "timezone": "Asia/Tokyo"}
    prefect_api.call(own_stack.api_url, "POST", f"{path}/schedules", [{"schedule": hourly, "active": False}])
    template = "{{ message }} and {{ message.content }}"
    edits = {
        "parameters": {**before["parameters"], "data": "/mine.jsonl", "overrides": {"template.prompt": template}},
        "tags": [*before["tags"], "mine"],
        "job_variables": {"env": {"NIGHT": "{{ $KEPT }}"}},
        "description": "The night of mine.",
        "paused": True,
        "concurrency_limit": 2,
    }
    prefect_api.call(own_stack.api_url, "PATCH", path, edits)
    set_by_hand = see()
    waiting = own_stack.start_run("pipeline/nightly", at="2099-01-01T00:00:00Z")
    for _ in range(2):
        state = own_stack.state
        state.deployed = "of another source"
        state.save(own_stack.home)
        said = own_stack.up()
        assert "registering" in said
        assert "pipeline/nightly keeps what was set in Prefect: " in said
        assert see() == set_by_hand
    shown = own_stack.type("rlhf", "status").stdout
    assert "pipeline/nightly, as set in Prefect: concurrency_limit: 2 (the file has None); description: 'The n" in shown
    assert "; job_variables.env.NIGHT set; parameters.data: '/mine.jsonl';" in shown
    assert own_stack.run_state(waiting) == "SCHEDULED"
    own_stack.delete_run(waiting)
    prefect_api.call(own_stack.api_url, "DELETE", path)  # how a person goes back to the file
    own_stack.up()
    assert nightly()["tags"] == before["tags"]


def test_one_night_runs_of_three_that_were_missed(own_stack: LocalStack, tmp_path: Path) -> None:
    own_stack.deploy_tiny_flows(TINY_FLOWS, "working.yaml")
    kill(psutil.Process(own_stack.pids()["worker"]))
    found = prefect_api.deployment(own_stack.api_url, "working/working")
    assert found is not None
    path = f"/deployments/{found['id']}"
    (tmp_path / "may-end").touch()
    night = {"tags": ["starts-within-6h"], "parameters": {"directory": str(tmp_path)}}
    prefect_api.call(own_stack.api_url, "PATCH", path, night)
    schedule = {"schedule": {"interval": 2.0}, "active": True}
    [made] = prefect_api.call(own_stack.api_url, "POST", f"{path}/schedules", [schedule])
    where = {"deployments": {"id": {"any_": [found["id"]]}}}

    def due() -> list[str]:
        runs = prefect_api.flow_runs(own_stack.api_url, where)
        now = datetime.now(UTC)
        passed = [run for run in runs if datetime.fromisoformat(run["expected_start_time"]) < now]
        return [str(run["id"]) for run in sorted(passed, key=lambda run: str(run["expected_start_time"]))]

    wait_for(lambda: len(due()) >= 3, "three nights to be missed", timeout_s=120)
    prefect_api.call(own_stack.api_url, "PATCH", f"{path}/schedules/{made['id']}", {"active": False})
    *earlier, last = due()
    own_stack.up()
    wait_for(lambda: all(own_stack.is_over(run) for run in (*earlier, last)), "the nights to end", timeout_s=120)
    assert own_stack.history(last)[-1] == "Completed"
    assert {own_stack.history(run)[-1] for run in earlier} == {"Skipped"}
    assert own_stack.message(earlier[0]).endswith("which is due by now too, takes its place")


def test_down_ends_a_run_its_live_cluster_and_all_else_and_data_are_kept(own_stack: LocalStack, tmp_path: Path) -> None:
    own_stack.store(tmp_path / "cache").commit("dataset", "kept", {"rows": b"1"})
    run, record = own_stack.start_cluster_run(tmp_path)
    pids = [process.pid for process in own_stack.processes()]
    sockets = own_stack.state.socket_dir
    assert record.is_running
    own_stack.down()
    assert own_stack.processes() == leftover_processes(record.mark, record.head) == []
    assert [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"] == []
    assert not record.temp_dir.exists()
    assert not list((own_stack.home / "clusters").glob("*.json"))
    assert sockets is not None
    assert not sockets.exists()
    before = own_stack.state.ports
    with turn():
        usual = {name: port for name, port in (("prefect", 4200), ("s3", 8333)) if is_free(port)}
        own_stack.up()
    assert own_stack.state.ports == before | usual, "the usual ports are taken back, all others stay"
    assert f"127.0.0.1:{own_stack.state.ports['prefect']}/" in own_stack.env_file.read_text()
    assert own_stack.run_state(run) == "CRASHED"
    assert "ended with the local stack" in own_stack.message(run)
    store = own_stack.store(tmp_path / "cache")
    assert store.read_bytes(store.resolve("dataset/kept@1"), "rows") == b"1"


def test_down_ends_a_cluster_whose_run_and_watchdog_were_killed(own_stack: LocalStack, tmp_path: Path) -> None:
    _, record = own_stack.start_cluster_run(tmp_path)
    kill(psutil.Process(record.watchdog_pid))
    kill(psutil.Process(record.owner.pid))
    own_stack.down()
    assert own_stack.processes() == leftover_processes(record.mark, record.head) == []
    assert not record.temp_dir.exists()
    assert not list((own_stack.home / "clusters").glob("*.json"))
    own_stack.up()


def test_a_run_is_followed_through_a_restart_of_the_server(own_stack: LocalStack, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with out.open("w") as said:
        command = ["rlhf", "run", "tiny/tiny", "-p", "sleep_s=10"]
        follower = subprocess.Popen(command, env=own_stack.environment, stdout=said, stderr=said, text=True)
        try:
            wait_for(lambda: "running" in out.read_text(), "the run to start")
            kill(psutil.Process(own_stack.pids()["server"]))
            own_stack.up()
            assert follower.wait(timeout=180) == 0, out.read_text()
        finally:
            follower.kill()
            follower.wait()
    assert out.read_text().splitlines()[-1] == "finished"

"""`rlhf up --supervise`: services that die or hang come back, and `rlhf down` has the last word."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import psutil
import pytest

from infra.services import prefect_api
from tests.integration.local_stack import LocalStack, run_beside_usual_ports, turn, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.stack]

SERVICES = ("store", "server", "worker")


@pytest.fixture(scope="module")
def own_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with run_beside_usual_ports(tmp_path_factory.mktemp("own")) as running:
        yield running


@pytest.fixture(scope="module")
def supervised(own_stack: LocalStack) -> Iterator[LocalStack]:
    with own_stack.supervised():
        yield own_stack


def said(stack: LocalStack, *, after: int = 0) -> str:
    """Return what the supervisor has said, without so many characters at the beginning."""
    return (stack.home / "supervisor.out").read_text()[after:]


def await_another(stack: LocalStack, before: dict[str, int], name: str) -> None:
    """Wait until a service has another process and everything works."""
    wait_for(lambda: stack.pids().get(name) not in (None, before[name]), f"another {name}", timeout_s=120)
    wait_for(stack.works, "the stack to work", timeout_s=120, every_s=1)
    assert {each for each in SERVICES if stack.pids()[each] != before[each]} == {name}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_that_is_killed_is_brought_back(supervised: LocalStack, name: str) -> None:
    before = supervised.pids()
    psutil.Process(before[name]).kill()
    await_another(supervised, before, name)
    assert prefect_api.deployment(supervised.api_url, "pipeline/nightly") is not None, "the server's data are there"


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_that_does_not_answer_is_replaced(supervised: LocalStack, name: str) -> None:
    before = supervised.pids()
    hung = psutil.Process(before[name])
    hung.suspend()
    await_another(supervised, before, name)
    assert not hung.is_running()


def test_a_stack_has_one_supervisor_and_an_up_beside_it_changes_nothing(supervised: LocalStack) -> None:
    assert supervised.service_states()["supervisor"] == "running"
    before = supervised.pids()
    second = supervised.type("rlhf", "up", "--supervise")
    supervisor = supervised.state.supervisor
    assert supervisor is not None
    sentence = (
        f"rlhf: the stack is supervised already, by process {supervisor.pid}; end that one first, or leave it to it"
    )
    assert (second.returncode, second.stderr) == (1, f"{sentence}\n")
    assert "starting" not in supervised.up()
    assert supervised.pids() == before
    assert supervised.state.supervisor == supervisor


def test_a_service_that_cannot_start_is_tried_less_and_less_often_and_comes_back_when_it_can(
    supervised: LocalStack,
) -> None:
    before, env = supervised.pids(), supervised.env_file.read_text()
    said_before = len(said(supervised))

    def waits() -> list[int]:
        told = said(supervised, after=said_before)
        return [int(each) for each in re.findall(r"the server has died again.*: the next is in (\d+) s", told)]

    with socket.create_server(("127.0.0.1", 0)) as anothers:
        supervised.env_file.write_text(f"RLHF_PREFECT_PORT={anothers.getsockname()[1]}\n{env}")
        try:
            psutil.Process(before["server"]).kill()
            wait_for(lambda: len(waits()) > 1, "two waits", timeout_s=180)
        finally:
            supervised.env_file.write_text(env)
    first, second = waits()[:2]
    assert 0 < first < second, "each wait is longer than the one before"
    await_another(supervised, before, "server")


def test_down_ends_supervision_at_once_and_what_it_is_starting(supervised: LocalStack) -> None:
    supervisor = supervised.state.supervisor
    assert supervisor is not None
    before = len(said(supervised))
    with turn():  # `down` would wait for it, and the server be there by then
        psutil.Process(supervised.pids()["server"]).kill()
        begun = "starting the Prefect server"
        wait_for(lambda: begun in said(supervised, after=before), "the server to be started", timeout_s=180)
        assert "ending supervision" in supervised.down()
    assert supervisor.process() is None
    assert supervised.processes() == []
    assert "ending what was started" in said(supervised, after=before)
    assert supervised.service_states() == {**dict.fromkeys(SERVICES, "stopped"), "supervisor": "none", "runs": "none"}

"""A service is taken for well only while it is its own process that answers."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from infra.errors import ServiceError
from infra.services import seaweed
from infra.services.prefect_server import prefect_server
from infra.services.service import Service, stack_environment
from infra.services.state import StackState
from infra.services.status import is_well


class Stranger(BaseHTTPRequestHandler):
    """Whoever has the port answers what the server and the store answer."""

    told: list[str | None]

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.told.append(self.headers.get("Authorization"))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"true")

    def do_POST(self) -> None:
        self.do_GET()


@pytest.fixture
def port() -> Iterator[int]:
    """One on which a stranger answers; he is told nothing."""
    Stranger.told = []
    with HTTPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_port
        server.shutdown()
    assert set(Stranger.told) <= {None}


@pytest.fixture
def starting() -> Iterator[psutil.Process]:
    """A process that does not answer yet."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as program:
        yield psutil.Process(program.pid)
        program.communicate()


@pytest.fixture(params=["server", "store"])
def service(request: pytest.FixtureRequest, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    monkeypatch.setenv("RLHF_ENV_FILE", str(tmp_path / ".env"))
    address = f"http://127.0.0.1:{port}/api"
    (tmp_path / "stack.env").write_text(f"PREFECT_API_URL='{address}'\nPREFECT_API_AUTH_STRING='rlhf:word'\n")
    if request.param == "server":
        return prefect_server(tmp_path, port, None, "rlhf:word", 90)
    seaweed.prepare(tmp_path, lambda _: None, is_down=True)
    return seaweed.seaweed(tmp_path, dict.fromkeys(seaweed.PORT_NAMES, port), tmp_path)


def test_who_answers_in_a_services_place_is_not_taken_for_it(service: Service, starting: psutil.Process) -> None:
    with pytest.raises(ServiceError, match=r"does not have its port, on which another answers, after 0\.3 s"):
        service.await_ready(starting, timeout_s=0.3)
    assert service.probe(psutil.Process()) is None, "this process has the port"


def test_a_service_that_has_ended_is_not_well_whatever_its_port_answers(
    service: Service, starting: psutil.Process
) -> None:
    believing = replace(service, probe=lambda _: None)
    believing.await_ready(starting, timeout_s=0.3)
    starting.kill()
    starting.wait(30)
    with pytest.raises(ServiceError, match="ended while it started"):
        believing.await_ready(starting, timeout_s=30)


def test_a_process_of_the_stack_goes_to_the_stack_by_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "a.example")
    found = stack_environment("id", {})
    assert found["NO_PROXY"] == found["no_proxy"] == "a.example,127.0.0.1,localhost"


def test_a_database_and_its_password_are_told_to_the_server_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_DATABASE_URL", "postgresql+asyncpg://me:hunter2@db/prefect")
    assert not [value for value in stack_environment("id", {}).values() if "hunter2" in value]


def test_whoever_is_at_the_port_of_a_server_that_has_died_is_not_asked_for_its_worker(
    service: Service, starting: psutil.Process
) -> None:
    state = StackState(services={"server": service.record(starting)})
    starting.kill()
    starting.wait(30)
    assert not is_well("worker", state, psutil.Process())
    assert Stranger.told == []


def test_a_service_of_another_version_is_another(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    before = service.fingerprint
    assert service.fingerprint == before
    assert service.packages
    monkeypatch.setattr("infra.services.service.version", lambda package: f"a later {package}")
    assert service.fingerprint != before

"""`rlhf doctor` on ports: who holds one, and what `rlhf up` will do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.process_record import ProcessRecord
from infra.services import doctor
from infra.services.doctor import Finding
from infra.services.password import keep_password
from infra.services.ports import free_port
from infra.services.state import ServiceRecord, StackState, write_private
from infra.settings import Settings

LISTENER = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"


@pytest.fixture
def stranger() -> Iterator[tuple[int, int]]:
    """A program of somebody else's: its port and its process id."""
    program = subprocess.Popen([sys.executable, "-c", LISTENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with program:
        assert program.stdout is not None
        yield int(program.stdout.readline()), program.pid
        program.communicate()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHF_ENV_FILE", str(tmp_path / ".env"))
    for name in ("RLHF_STORE_URL", "RLHF_S3_ENDPOINT_URL", "RLHF_S3_PORT", "RLHF_PREFECT_PORT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def port_of_server(home: Path, port: int, monkeypatch: pytest.MonkeyPatch, **settings: int) -> Finding:
    """Return what the doctor says of a port that is the usual one of the Prefect server."""
    monkeypatch.setattr(doctor, "PREFECT_PORT", port)
    return next(doctor._ports(Settings(home=home, **settings)))


def runs_here(home: Path, port: int) -> StackState:
    """Have this process pass for the Prefect server of a stack."""
    address = f"http://127.0.0.1:{port}"
    record = ServiceRecord(identity=ProcessRecord.of(os.getpid()), fingerprint="", address=address, log=home)
    state = StackState(ports={"prefect": port}, services={"server": record})
    state.save(home)
    return state


def test_a_stranger_on_the_servers_last_port_is_not_taken_for_the_server(
    home: Path, stranger: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, pid = stranger
    StackState(ports={"prefect": port}).save(home)  # as `rlhf down` leaves it
    found = port_of_server(home, port, monkeypatch)
    assert found.verdict == "warning"
    assert found.seen.startswith(f"process {pid} ({sys.executable} -c import socket")
    assert found.seen.endswith(") has it, not the Prefect server")
    assert found.advice == "nothing, or end that program: `rlhf up` gives the Prefect server another port"


def test_a_stranger_on_the_port_that_the_user_set_keeps_the_stack_from_starting(
    home: Path, stranger: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = port_of_server(home, free_port(), monkeypatch, prefect_port=stranger[0])
    assert (found.name, found.verdict) == (f"port {stranger[0]}", "wrong")
    assert found.advice == "end that program, or unset RLHF_PREFECT_PORT: `rlhf up` refuses to start"


def test_the_server_that_has_its_port_is_known_by_its_process(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        runs_here(home, port)
        assert port_of_server(home, port, monkeypatch) == Finding(f"port {port}", "well", "the Prefect server has it")


def test_a_server_that_runs_elsewhere_is_said_to_stay_there(
    home: Path, stranger: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_here(home, 15001)
    stays = "the Prefect server stays at http://127.0.0.1:15001 while it runs"
    assert port_of_server(home, stranger[0], monkeypatch).advice == f"nothing: {stays}"
    found = port_of_server(home, free_port(), monkeypatch)
    assert (found.seen, found.advice) == ("free", f"{stays}; it comes here after `rlhf down` and `rlhf up`")


def test_a_password_that_others_may_know_is_wrong_wherever_it_stands(home: Path) -> None:
    assert list(doctor._password(Settings(home=home))) == [], "there is no stack"
    kept, env = home / "prefect.password", home / ".env"
    keep_password(home, "rlhf:secret")
    env.write_text("PREFECT_API_AUTH_STRING='rlhf:secret'\n")
    env.chmod(0o600)
    [finding] = doctor._password(Settings(home=home))
    assert finding == Finding("password", "well", f"in {kept}, for your eyes alone")
    env.chmod(0o604)
    [finding] = doctor._password(Settings(home=home))
    assert (finding.verdict, finding.seen) == (
        "wrong",
        f"{env} holds it and can be read by others (its mode is 0604)",
    )
    kept.chmod(0o640)
    [finding] = doctor._password(Settings(home=home))
    assert finding.verdict == "wrong"
    assert finding.seen.startswith(f"{kept} can be read by others (its mode is 0640, not 0600)")


def test_what_else_others_may_know_is_told_with_what_to_do(home: Path) -> None:
    names = ("stack.env", "store.secret", "store.pem")
    for name in names:
        write_private(home / name, "secret")
    assert list(doctor._secrets(Settings(home=home))) == []
    for name in names:
        (home / name).chmod(0o604)
    found = list(doctor._secrets(Settings(home=home)))
    assert [(each.name, each.verdict) for each in found] == [(name, "wrong") for name in names]
    assert found[0].seen == f"{home / 'stack.env'} can be read by others (its mode is 0604, not 0600)"


def test_a_password_file_that_is_lost_beside_a_stack_is_told(home: Path) -> None:
    runs_here(home, 15001)
    [finding] = doctor._password(Settings(home=home))
    assert (finding.verdict, finding.advice) == ("warning", "run `rlhf up`, which writes it again")


def test_an_exported_password_that_is_not_the_stacks_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_HOME", str(home))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    runs_here(home, 15001)
    (home / "stack.env").write_text("PREFECT_API_URL='http://127.0.0.1:15001/api'\nPREFECT_API_AUTH_STRING='a:b'\n")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "a:b")
    assert list(doctor._environment(Settings(home=home))) == []
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "hunter:2")
    [finding] = doctor._environment(Settings(home=home))
    assert finding.seen == "PREFECT_API_AUTH_STRING is exported, and is not the password of the stack's server"

"""The `prefect` command in the checkout: what its server's absence is told by."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from prefect import flow_engine
from prefect.client.schemas.objects import FlowRun, State
from prefect.runner._state_proposer import StateProposer
from prefect.states import Crashed
from prefect.workers.base import BaseWorker

from infra.prefect_plugin import asks_the_server, end_at_once, fault_of, patience_s, withhold_second_reports
from infra.process_record import ProcessRecord
from infra.services.state import ServiceRecord, StackState
from infra.services.worker import EVERY_WORKER
from infra.settings import CHECKOUT, inherited_environment

pytestmark = pytest.mark.integration  # processes of their own

PREFECT = str(Path(sys.executable).with_name("prefect"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    monkeypatch.setenv("RLHF_ENV_FILE", str(tmp_path / ".env"))
    return tmp_path


@pytest.fixture
def silent() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{unheard.getsockname()[1]}/api"


@pytest.fixture
def answering() -> Iterator[tuple[str, dict[str, bytes]]]:
    """The address of a server, and its answers by path; it has no others.

    Where it has one by the name of `who`, it refuses all who say another, but for its health.
    """
    answers: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            if self.path != "/api/health" and self.headers.get("Authorization", "").encode() != answers.get("who", b""):
                self.send_response(401)
            else:
                self.send_response(200 if self.path in answers else 404)
            self.end_headers()
            self.wfile.write(answers.get(self.path, b""))

        def do_POST(self) -> None:
            self.do_GET()

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/api", answers
        server.shutdown()


@pytest.fixture
def type_prefect(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that types `prefect WORDS` where pyproject.toml lies, in an environment that is as told.

    An environment that was set up before the plugin was written does not know it: it is registered anew.
    """
    points = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["entry-points"]["prefect.plugins"]
    installed = tmp_path / "installed" / "rlhf_flows-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: rlhf-flows\nVersion: 0\n")
    lines = [f"{name} = {module}\n" for name, module in points.items()]
    (installed / "entry_points.txt").write_text("".join(["[prefect.plugins]\n", *lines]))
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path)

    def type_it(*words: str, program: str = PREFECT, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, *words],
            cwd=tmp_path,
            env={
                **inherited_environment(without_prefixes=("PREFECT_", "RLHF_")),
                "PYTHONPATH": os.pathsep.join([str(installed.parent), str(CHECKOUT)]),
                "RLHF_HOME": str(tmp_path),
                "RLHF_ENV_FILE": str(tmp_path / ".env"),
                "PREFECT_HOME": str(tmp_path / "prefect"),
                **variables,
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return type_it


def test_the_command_in_the_checkout_says_one_sentence(
    silent: str, type_prefect: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    result = type_prefect("deployment", "run", "ppo/llama7b", PREFECT_API_URL=silent)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"prefect: the Prefect server at {silent} does not answer; run `rlhf up`, or correct PREFECT_API_URL\n"
    )


def test_the_command_says_which_password_is_refused(
    answering: tuple[str, dict[str, bytes]],
    tmp_path: Path,
    type_prefect: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    url, answers = answering
    answers |= {"/api/health": b"true", "who": b"Basic cmxoZjpyaWdodA=="}  # rlhf:right
    (tmp_path / "stack.env").write_text(f"PREFECT_API_URL='{url}'\nPREFECT_API_AUTH_STRING='rlhf:right'\n")
    line = f"the line in {tmp_path / 'prefect.password'}\n"
    result = type_prefect("deployment", "ls", PREFECT_API_URL=url)
    assert (result.returncode, result.stderr) == (
        1,
        f"prefect: the Prefect server at {url} asks for a password; set PREFECT_API_AUTH_STRING to {line}",
    )
    result = type_prefect("deployment", "ls", PREFECT_API_URL=url, PREFECT_API_AUTH_STRING="rlhf:wrong")
    assert (result.returncode, result.stderr) == (
        1,
        f"prefect: the Prefect server at {url} does not take PREFECT_API_AUTH_STRING as it is exported; unset it, or "
        f"set it to {line}",
    )


def test_the_command_tells_a_server_of_ones_own_nothing_of_the_local_stacks(
    answering: tuple[str, dict[str, bytes]],
    tmp_path: Path,
    type_prefect: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    url, answers = answering
    answers |= {"/api/health": b"true", "/api/admin/version": b'"3.8.8"', "who": b"Bearer key"}
    answers |= {"/api/deployments/filter": b"[]", "/api/flows/filter": b"[]"}
    told = "PREFECT_API_URL='http://127.0.0.1:4200/api'\nPREFECT_API_AUTH_STRING='rlhf:local'\n"
    for name in ("stack.env", ".env"):  # as `rlhf up` writes them
        (tmp_path / name).write_text(told)
    result = type_prefect("deployment", "ls", PREFECT_API_URL=url, PREFECT_API_KEY="key")
    assert result.returncode == 0, result.stdout + result.stderr
    result = type_prefect("deployment", "ls", PREFECT_API_URL=url, PREFECT_API_KEY="wrong")
    assert result.stderr == (
        f"prefect: the Prefect server at {url} does not take PREFECT_API_KEY as it is exported; correct it\n"
    )


def test_the_command_goes_to_the_stack_by_no_proxy_and_not_by_a_name_that_may_be_anothers(
    answering: tuple[str, dict[str, bytes]],
    silent: str,
    tmp_path: Path,
    type_prefect: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    url, answers = answering
    answers |= {"/api/health": b"true", "/api/admin/version": b'"3.8.8"', "who": b"Basic cmxoZjpyaWdodA=="}
    answers |= {"/api/deployments/filter": b"[]", "/api/flows/filter": b"[]"}
    (tmp_path / "stack.env").write_text(f"PREFECT_API_URL='{url}'\nPREFECT_API_AUTH_STRING='rlhf:right'\n")
    by_name = url.replace("127.0.0.1", "localhost")
    variables = {"PREFECT_API_URL": by_name, "PREFECT_API_AUTH_STRING": "rlhf:right"}
    proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy"), silent.removesuffix("/api"))
    result = type_prefect("deployment", "ls", **variables, **proxies)
    assert result.returncode == 0, result.stdout + result.stderr
    seen = "import prefect; from prefect.settings import PREFECT_API_URL; print(PREFECT_API_URL.value())"
    program = ("-c", seen)
    said = type_prefect(*program, program=sys.executable, **variables)
    assert said.stdout.strip() == url, said.stderr


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        ("prefect deployment run ppo/llama7b", True),
        ("/a/.venv/bin/prefect --no-prompt -p local flow-runs ls", True),
        ("prefect deploy", True),
        ("prefect deployment", False),  # its help
        ("prefect deployment run --help", False),
        ("prefect version", False),
        ("prefect server start", False),
        ("prefect config view", False),
        ("prefect worker start --pool rlhf", False),  # it has words of its own
        ("prefect", False),
        ("pytest deployment run", False),
        ("-m deployment run", False),  # `python -m prefect`, as the stack's own programs are started
    ],
)
def test_only_commands_that_ask_the_server_are_looked_at(words: str, asks: bool) -> None:
    assert asks_the_server(words.split()) is asks


def test_no_address_is_told() -> None:
    told = "no Prefect server is known here; start one with `rlhf up`, or set PREFECT_API_URL"
    assert fault_of(None) == fault_of("") == told


@pytest.mark.parametrize("url", ["nonsense", "http://127.0.0.1:99999/api", "http://name.invalid/api"])
def test_an_address_that_leads_nowhere_is_told(url: str, home: Path) -> None:
    assert home.is_dir()
    assert fault_of(url) == f"the Prefect server at {url} does not answer; run `rlhf up`, or correct PREFECT_API_URL"


def test_a_stack_that_runs_elsewhere_is_pointed_at(silent: str, home: Path) -> None:
    address = "http://127.0.0.1:15001"
    record = ServiceRecord(identity=ProcessRecord.of(os.getpid()), fingerprint="", address=address, log=home)
    StackState(services={"server": record}).save(home)
    assert fault_of(silent) == (
        f"the Prefect server at {silent} does not answer; the local stack's is {address}/api: set PREFECT_API_URL to "
        "it, or unset it and run `rlhf up`"
    )


def test_another_program_on_the_servers_port_is_told(answering: tuple[str, dict[str, bytes]], home: Path) -> None:
    assert home.is_dir()
    url, answers = answering
    told = f"what answers at {url} is no Prefect server; run `rlhf up`, or correct PREFECT_API_URL"
    assert fault_of(url) == told
    answers["/api/health"] = b"<html>"
    assert fault_of(url) == told
    answers["/api/health"] = b"true"
    assert fault_of(url) is fault_of(f"{url}/") is None


@pytest.mark.parametrize(
    ("variables", "limit_s"),
    [
        ({}, 0.0),
        ({"RLHF_SERVER_PATIENCE_S": "960", "PREFECT__FLOW_RUN_ID": "one"}, 960.0),
        ({"RLHF_SERVER_PATIENCE_S": "960"}, 24 * 3600.0),
        ({"PREFECT__FLOW_RUN_ID": "one"}, 0.0),
    ],
    ids=["typed by a person", "a run", "its worker", "a worker that is told nothing"],
)
def test_who_waits_for_a_server_that_is_away(variables: dict[str, str], limit_s: float) -> None:
    assert patience_s(variables) == limit_s


def test_a_worker_reports_a_crash_again_only_where_its_first_report_came_to_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, told = [Crashed(), None, Crashed()], []

    async def first(*_: object) -> State | None:
        return answers.pop(0)

    async def second(_self: object, run: FlowRun, message: str, _client: object = None) -> None:
        told.append((run, message))

    monkeypatch.setattr(StateProposer, "propose_crashed", first)
    monkeypatch.setattr(BaseWorker, "_propose_crashed_state", second)
    withhold_second_reports()

    async def crash(start: FlowRun) -> None:
        await StateProposer.propose_crashed(None, start, "at once")  # type: ignore[arg-type]
        await BaseWorker._propose_crashed_state(None, start, "later")  # type: ignore[arg-type]

    starts = [FlowRun(flow_id=uuid4()) for _ in answers]
    for start in starts:
        asyncio.run(crash(start))
    assert [(run is starts[1], message) for run, message in told] == [(True, "later")]


def test_a_flow_does_not_wait_for_the_sleeping_thread_of_its_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = flow_engine
    monkeypatch.setattr(engine, "_send_heartbeats", engine._send_heartbeats)
    end_at_once()
    beaten, others = threading.Event(), set(threading.enumerate())
    beat = SimpleNamespace(heartbeat_seconds=30, flow_run=None, logger=logging.getLogger())
    beat._build_heartbeat_event_template, beat._emit_flow_run_heartbeat = lambda: ({}, []), lambda *_: beaten.set()
    with engine._send_heartbeats(beat):
        assert beaten.wait(10)
    (sleeping,) = set(threading.enumerate()) - others
    sleeping.join(10)
    assert not sleeping.is_alive()


def test_a_process_of_the_stack_connects_to_nobody_in_its_servers_place(
    answering: tuple[str, dict[str, bytes]], silent: str, tmp_path: Path
) -> None:
    """Where nobody listens it does not even knock: whoever does a moment later would be told the password."""
    url, answers = answering
    answers["/api/health"] = b"true"
    knock = """
import prefect, socket, sys
for port in map(int, sys.argv[1:]):
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
        print("open")
    except ConnectionRefusedError as error:
        print(error.strerror)
"""
    for own, told in ((silent, "open nobody listens there"), (url, "open Connection refused")):
        (tmp_path / "stack.env").write_text(f"PREFECT_API_URL='{own}'\nPREFECT_API_AUTH_STRING='rlhf:right'\n")
        variables = {
            **inherited_environment(without_prefixes=("PREFECT_", "RLHF_")),
            **{"PREFECT_API_URL": own, "RLHF_HOME": str(tmp_path), "PREFECT_HOME": str(tmp_path)},
            **{"PYTHONPATH": str(CHECKOUT), **EVERY_WORKER, "RLHF_ENV_FILE": str(tmp_path / ".env")},
        }
        ports = [str(urlsplit(each).port) for each in (url, silent)]
        words = [sys.executable, "-c", knock, *ports]
        said = subprocess.run(
            words, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60, check=True
        )
        assert " ".join(said.stdout.splitlines()) == told


@pytest.mark.parametrize("told", [True, False], ids=["as a worker tells it", "as a person types it"])
def test_a_process_learns_it_before_it_has_a_client(told: bool, silent: str, tmp_path: Path) -> None:
    clients = "import prefect.client.orchestration as made; print(made.PrefectHttpxSyncClient.__name__)"
    variables = {
        **inherited_environment(without_prefixes=("PREFECT_", "RLHF_")),
        "PREFECT_API_URL": silent,
        "PREFECT_HOME": str(tmp_path),
        "PYTHONPATH": str(CHECKOUT),
        **(dict(EVERY_WORKER) if told else {}),
    }
    words = [sys.executable, "-c", f"import prefect; {clients}"]
    said = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.strip() == ("PatientSyncClient" if told else "PrefectHttpxSyncClient")


def test_a_flow_whose_worker_was_killed_writes_on(tmp_path: Path) -> None:
    """Its lines go through a pipe that nobody reads any more."""
    told = tmp_path / "told"
    script = f"""
import sys
import prefect
from prefect.logging import get_logger

sys.stdin.readline()  # until the other end is closed
for _ in range(3):
    get_logger("a").warning("a line")
    print("a line", flush=True)
    print("a line", file=sys.stderr, flush=True)
open({str(told)!r}, "w").write("to its end")
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, **EVERY_WORKER, "PREFECT__FLOW_RUN_ID": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.close()
    process.stdin.write(b"\n")
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    assert told.read_text() == "to its end"

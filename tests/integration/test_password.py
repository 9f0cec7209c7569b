"""The Prefect server of the local stack asks for its password, everywhere; everything of the stack knows it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from base64 import b64encode
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from infra.clusters import leftover_processes
from infra.errors import ServiceError
from infra.services import prefect_api
from tests.integration.browser import browser
from tests.integration.local_stack import LocalStack, read_json, turn, usual_ports_occupied, wait_for

pytestmark = pytest.mark.integration

DESCRIPTION = ("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc")
"""What this version of Prefect's API looks like: the same on every server."""
OPEN = {
    ("GET", "/api/health"),
    ("GET", "/api/ready"),
    ("GET", "/ui-settings"),  # where the API is, and that it asks for a password
    *(
        (method, f"/{page}")
        for page in ("openapi.json", "docs", "docs/oauth2-redirect", "redoc")
        for method in ("GET", "HEAD")
    ),
}
"""What answers everybody, by intent; and the files of the UI, which are not routes."""
ROUTES = """
import json
from prefect.server.api.server import create_app

def walk(routes, prefix):
    for route in routes:
        kind = type(route).__name__
        if kind == "_IncludedRouter":
            yield from walk(route.original_router.routes, prefix)
        elif kind == "Mount":
            yield from walk(getattr(route.app, "routes", []), prefix + route.path)
        else:
            yield [kind, prefix + route.path, sorted(getattr(route, "methods", None) or [])]

print(json.dumps(list(walk(create_app().routes, ""))))
"""


@pytest.fixture(scope="module")
def routes(stack: LocalStack) -> list[tuple[str, str, str]]:
    """Kind, method and path of all that Prefect's server answers, its own application says."""
    environment = {**stack.environment, "PREFECT_HOME": str(stack.home / "prefect")}
    told = subprocess.run(
        [sys.executable, "-c", ROUTES],
        cwd=stack.home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = [(kind, method, path) for kind, path, methods in json.loads(told.stdout) for method in methods or [""]]
    assert len(found) > 150, "there was something to look at"
    return found


def address(stack: LocalStack) -> str:
    return stack.state.services["server"].address


def filled(path: str) -> str:
    """Return a path with something in place of its parameters."""
    return re.sub(r"\{[^}]*\}", "x", re.sub(r"\{\w+:uuid\}", "00000000-0000-0000-0000-000000000000", path))


def answering(stack: LocalStack, routes: list[tuple[str, str, str]], password: str | None) -> set[tuple[str, str]]:
    """Return the routes that do anything else than refuse."""
    headers = {} if password is None else {"Authorization": f"Basic {b64encode(password.encode()).decode()}"}
    found = set()
    with httpx.Client(base_url=address(stack), headers=headers, timeout=60) as client:
        for _, method, path in routes:
            if method:
                body = {} if method in {"POST", "PUT", "PATCH"} else None
                status = client.request(method, filled(path), json=body).status_code
                if status != httpx.codes.UNAUTHORIZED:
                    found.add((method, path))
    return found


def socket_says(stack: LocalStack, path: str, *first: dict[str, Any], protocol: str | None = "prefect") -> str:
    """Return what a socket says to a first message, or how it is closed."""
    url = f"{address(stack).replace('http', 'ws', 1)}{filled(path)}"
    try:
        with connect(url, subprotocols=[Subprotocol(protocol)] if protocol else None) as opened:
            for message in first:
                opened.send(json.dumps(message))
            return str(json.loads(opened.recv(timeout=20))["type"])
    except (ConnectionClosed, InvalidStatus) as error:
        return type(error).__name__


def sockets(routes: list[tuple[str, str, str]]) -> list[str]:
    found = [path for kind, _, path in routes if "WebSocket" in kind]
    assert {"/api/events/in", "/api/events/out", "/api/logs/out"} <= set(found)
    return found


def refuses_everywhere(stack: LocalStack, routes: list[tuple[str, str, str]], password: str | None) -> None:
    assert answering(stack, routes, password) == OPEN
    for path in sockets(routes):
        told = {"type": "auth", **({} if password is None else {"token": password})}
        assert socket_says(stack, path, told) == "ConnectionClosedError", path


@pytest.mark.parametrize(
    "password", [None, *(pytest.param(wrong, marks=pytest.mark.stack) for wrong in ("rlhf:wrong", "rlhf:"))]
)
def test_every_route_and_socket_refuses_whoever_does_not_know_the_password(
    stack: LocalStack, routes: list[tuple[str, str, str]], password: str | None
) -> None:
    refuses_everywhere(stack, routes, password)


def test_a_socket_is_not_talked_to_before_the_password(stack: LocalStack, routes: list[tuple[str, str, str]]) -> None:
    right = {"type": "auth", "token": stack.password}
    for path in sockets(routes):
        assert socket_says(stack, path, {"type": "filter", "filter": {}}) == "ConnectionClosedError"
        assert socket_says(stack, path, right, protocol=None) == "InvalidStatus", "as clients of old talked"
        assert socket_says(stack, path, right) == "auth_success"


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:1", "null", "localhost"])
def test_a_page_from_elsewhere_may_not_ask(stack: LocalStack, origin: str) -> None:
    ours = address(stack)
    if origin == "localhost":  # at this port, which may be another user's by that name
        origin = ours.replace("127.0.0.1", "localhost")
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}
    url = f"{stack.api_url}/flow_runs/filter"
    refused = httpx.options(url, headers={"Origin": origin, **asked}, timeout=60)
    assert refused.status_code == httpx.codes.BAD_REQUEST
    assert "access-control-allow-origin" not in refused.headers
    seen = httpx.get(f"{stack.api_url}/health", headers={"Origin": origin}, timeout=60)
    assert "access-control-allow-origin" not in seen.headers, "its script may not even read what is open"
    allowed = httpx.options(url, headers={"Origin": ours, **asked}, timeout=60)
    assert allowed.headers["access-control-allow-origin"] == ours


@pytest.mark.stack
def test_the_password_is_in_two_files_of_the_home_and_in_the_env_file_and_only_their_owner_reads_them(
    own_stack: LocalStack,
) -> None:
    run = own_stack.start_run("tiny/tiny", sleep_s=20)
    wait_for(lambda: own_stack.run_state(run) == "RUNNING", "the run to start")
    password = own_stack.password
    up, status = own_stack.up(), own_stack.type("rlhf", "status").stdout
    said = up + status + own_stack.type("rlhf", "doctor", "--json").stdout
    for secret in (password, password.partition(":")[2], b64encode(password.encode()).decode()):
        assert own_stack.holders_of(secret) <= {"prefect.password", "stack.env"}
        assert not [process for process in own_stack.processes() if secret in " ".join(process.cmdline())]
        assert secret not in said
    assert own_stack.holders_of(password) == {"prefect.password", "stack.env"}
    for path in (own_stack.home / "prefect.password", own_stack.home / "stack.env", own_stack.env_file):
        assert path.stat().st_mode & 0o777 == 0o600
    file = own_stack.home / "prefect.password"
    for text in (up, status):
        assert f"Prefect UI: {address(own_stack)} (it asks for a password: the line in {file})" in text
    wait_for(lambda: own_stack.run_state(run) == "COMPLETED", "the run to end")


def test_a_run_is_started_followed_and_heard_of_by_everything_that_has_the_password(stack: LocalStack) -> None:
    stack.deploy_tiny_flows()
    since = datetime.now(UTC).isoformat()
    followed = stack.type("rlhf", "run", "tiny/tiny")
    assert followed.returncode == 0, followed.stdout + followed.stderr
    assert followed.stdout.splitlines()[-1] == "finished"
    command = ("prefect", "deployment", "run", "tiny/tiny", "--watch")
    started = stack.type(*command, cwd=stack.env_file.parent)
    assert started.returncode == 0, started.stdout + started.stderr
    where = {"filter": {"event": {"name": ["tiny.began"]}, "occurred": {"since": since}}}
    path = "/events/filter"
    wait_for(lambda: prefect_api.call(stack.api_url, "POST", path, where)["total"] == 2, "the events of both runs")
    installed = stack.type("rlhf", "automations")
    assert installed.returncode == 0, installed.stderr
    assert "are as they should be" in installed.stdout


@pytest.mark.stack
def test_a_runs_ray_cluster_is_not_told_the_password(own_stack: LocalStack, tmp_path: Path) -> None:
    run, record = own_stack.start_cluster_run(tmp_path)
    try:
        known = {
            process.pid: process.environ().get("PREFECT_API_AUTH_STRING") for process in own_stack.processes_of(run)
        }
        assert known[record.owner.pid] == own_stack.password, "the flow's process has it"
        ray = [process.environ() for process in leftover_processes(record.mark)]
        assert len([each for each in ray if each.get("RAY_AUTH_MODE") == "token"]) > 2, "there was something to look at"
        assert not [each for each in ray if own_stack.password in each.values() and "RAY_AUTH_TOKEN_PATH" in each]
    finally:
        own_stack.cancel(run)


COUNT_REFUSALS = """
    window.refused = 0;
    const ask = window.fetch, send = XMLHttpRequest.prototype.send;
    const count = status => { window.refused += status === 401; };
    window.fetch = (...all) => ask(...all).then(answer => { count(answer.status); return answer; });
    XMLHttpRequest.prototype.send = function (...all) {
        this.addEventListener("load", () => count(this.status));
        return send.apply(this, all);
    };
"""
"""v1 says that a password is wrong before one is typed, too: what the server answers is counted."""
REFUSED = {"v2": "Invalid credentials", "v1": "Authentication failed"}
"""What the two versions of the UI say of a wrong password."""


@pytest.mark.stack
@pytest.mark.parametrize("version", ["v2", "v1"])
def test_the_ui_asks_for_the_password_and_says_that_a_wrong_one_is_wrong(
    own_stack: LocalStack, tmp_path: Path, version: str
) -> None:
    run = own_stack.start_run("tiny/tiny")
    wait_for(lambda: own_stack.run_state(run) == "COMPLETED", "the run to end")
    name = str(prefect_api.call(own_stack.api_url, "GET", f"/flow_runs/{run}")["name"])
    home, field = address(own_stack), "input[type=password]"
    runs = f"{home}/v2/runs" if version == "v2" else f"{home}/runs"
    with browser() as window:
        window.open(home)
        window.run(f"document.cookie = 'prefect_ui_version={version}; path=/'")
        window.open(home)
        wait_for(lambda: window.type(field, "rlhf:wrong"), "the UI to ask for the password")
        window.run(COUNT_REFUSALS)
        window.type(field, "\n")
        wait_for(lambda: window.run("return window.refused"), "the server to refuse it")
        wait_for(lambda: REFUSED[version] in window.text, "the UI to say that it is wrong")
        assert "Deployments" not in window.text
        window.picture(tmp_path / "wrong.png")
        window.open(home)
        wait_for(lambda: window.type(field, f"{own_stack.password}\n"), "the UI to ask again")
        wait_for(lambda: "Deployments" in window.text, "the UI to open")
        window.open(runs)
        wait_for(lambda: name in window.text, f"run {name} in the UI")
        window.picture(tmp_path / "runs.png")
        window.open(f"{runs}/flow-run/{run}")
        wait_for(lambda: name in window.text and "Completed" in window.text, f"the page of run {name}")
        window.picture(tmp_path / "run.png")


@pytest.mark.stack
def test_a_password_is_not_changed_beside_a_live_run_which_goes_on(own_stack: LocalStack) -> None:
    run = own_stack.start_run("tiny/tiny", sleep_s=15)
    wait_for(lambda: own_stack.run_state(run) == "RUNNING", "the run to start")
    before, pids = own_stack.password, own_stack.pids()
    refused = own_stack.type("rlhf", "up", "--new-password")
    assert refused.returncode == 1
    assert refused.stderr == (
        "rlhf: 1 flow run holds the Prefect server's former password, and would lose the server with another; change "
        "it when it has ended (see `rlhf status`), or end everything with `rlhf down` before\n"
    )
    assert (own_stack.password, own_stack.pids()) == (before, pids)
    wait_for(lambda: own_stack.run_state(run) == "COMPLETED", "the run to end")
    assert own_stack.history(run)[-2:] == ["Running", "Completed"]


@pytest.mark.stack
def test_a_password_file_that_is_lost_is_written_again_and_nothing_is_started_anew(own_stack: LocalStack) -> None:
    before, pids = own_stack.password, own_stack.pids()
    (own_stack.home / "prefect.password").unlink()
    assert "was lost, and is written again" in own_stack.up()
    assert (own_stack.password, own_stack.pids()) == (before, pids)
    (own_stack.home / "prefect.password").unlink()
    (own_stack.home / "stack.env").unlink()
    own_stack.up()
    assert (own_stack.password, own_stack.pids()) == (before, pids), "the processes know it"


@pytest.mark.stack
@pytest.mark.parametrize("content", [None, "rlhf", "rlhf:geheimnüs", ""])
def test_a_password_file_that_others_read_or_that_holds_none_is_refused_and_nothing_is_touched(
    own_stack: LocalStack, content: str | None
) -> None:
    path, before, pids = own_stack.home / "prefect.password", own_stack.password, own_stack.pids()
    if content is None:
        path.chmod(0o644)
    else:
        path.write_text(content)
    refused = own_stack.type("rlhf", "up")
    found = {each["name"]: each for each in read_json(own_stack.type("rlhf", "doctor", "--json"))}["password"]
    path.chmod(0o600)
    path.write_text(f"{before}\n")
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"rlhf: {path} ")
    assert len(refused.stderr.splitlines()) == 1
    assert found["verdict"] == "wrong"
    assert own_stack.pids() == pids
    assert "starting" not in own_stack.up()


@pytest.mark.stack
def test_an_env_file_that_others_could_read_is_closed_and_that_is_said(own_stack: LocalStack) -> None:
    own_stack.env_file.chmod(0o644)
    said = "".join(own_stack.up().splitlines())
    assert "could be read by others (its mode was 0644) and is yours alone now" in said
    assert "which they may know: `rlhf up --new-password` draws another" in said
    assert own_stack.env_file.stat().st_mode & 0o777 == 0o600


@pytest.mark.stack
def test_an_exported_password_of_another_server_is_told_and_ours_work_all_the_same(own_stack: LocalStack) -> None:
    elsewhere = {"PREFECT_API_AUTH_STRING": "me:elsewhere"}
    up = own_stack.type("rlhf", "up", **elsewhere)
    assert up.returncode == 0
    assert "PREFECT_API_AUTH_STRING is exported, and is not this server's" in up.stdout
    assert own_stack.type("rlhf", "run", "tiny/tiny", **elsewhere).returncode == 0


@pytest.mark.stack
def test_after_a_change_the_former_password_is_refused_everywhere_and_all_works_with_the_new_one(
    own_stack: LocalStack, routes: list[tuple[str, str, str]]
) -> None:
    former = own_stack.password
    changed = own_stack.type("rlhf", "up", "--new-password")
    assert changed.returncode == 0, changed.stdout + changed.stderr
    assert own_stack.password != former
    assert own_stack.password not in changed.stdout + changed.stderr
    assert own_stack.holders_of(former) == set()
    refuses_everywhere(own_stack, routes, former)
    test_a_run_is_started_followed_and_heard_of_by_everything_that_has_the_password(own_stack)


@pytest.mark.stack
def test_a_password_of_ones_own_and_settings_of_ones_own_are_taken_but_not_those_that_open_the_server(
    own_stack: LocalStack,
) -> None:
    bad = own_stack.type("rlhf", "up", PREFECT_SERVER_API_AUTH_STRING="ich:geheimnüs")
    assert bad.returncode == 1
    assert bad.stderr == (
        "rlhf: PREFECT_SERVER_API_AUTH_STRING, as it is set, is no password for the Prefect server, which takes "
        "user:password in ASCII: it has characters beyond ASCII\n"
    )
    own = {
        "PREFECT_SERVER_API_AUTH_STRING": "me:my:own",
        "PREFECT_SERVER_API_KEEPALIVE_TIMEOUT": "9",
        "PREFECT_SERVER_API_DEFAULT_LIMIT": "150",
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": "*",
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": "*",
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
    }
    taken = own_stack.type("rlhf", "up", **own)
    assert taken.returncode == 0, taken.stdout + taken.stderr
    assert own_stack.password == "me:my:own"
    said = prefect_api.call(own_stack.api_url, "GET", "/admin/settings")["server"]["api"]
    assert (said["keepalive_timeout"], said["default_limit"], said["csrf_protection_enabled"]) == (9, 200, False)
    assert "*" not in said["cors_allowed_origins"]
    assert own_stack.type("rlhf", "run", "tiny/tiny").returncode == 0


@pytest.mark.stack
def test_the_stack_comes_back_with_its_password_after_it_was_down(own_stack: LocalStack) -> None:
    before = own_stack.password
    own_stack.down()
    with pytest.raises(ServiceError, match="does not answer"):
        prefect_api.call(f"http://127.0.0.1:{own_stack.state.ports['prefect']}/api", "GET", "/version")
    with turn(), usual_ports_occupied():  # it keeps off them, as it did before
        own_stack.up()
    assert own_stack.password == before
    assert own_stack.type("rlhf", "status").returncode == 0

"""`rlhf run` with Prefect's own client, against a server that says what each test wants it to say."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, Log
from prefect.client.schemas.responses import DeploymentResponse
from prefect.settings import PREFECT_CLIENT_CUSTOM_HEADERS, temporary_settings
from prefect.states import Completed, Crashed, Failed, Pending, Running, Scheduled, State

from flows import cli
from flows.cli import run as verb
from infra.artifacts import open_default_store
from infra.process_record import ProcessRecord
from infra.services.automations import RESTARTING, RESUMES
from infra.services.state import ServiceRecord, StackState
from rlhf_core.escaping import block, code, table
from tests.hostile_texts import HARMFUL, HOSTILE

FLOW_ID, RUN_ID = uuid4(), uuid4()
DEPLOYMENT = DeploymentResponse(
    id=uuid4(),
    name="quickstart",
    flow_id=FLOW_ID,
    parameters={"preset": "quickstart"},
    parameter_openapi_schema={"type": "object", "properties": {"preset": {}, "data": {}, "seed": {}}},
)


class Server:
    """A Prefect server of a few answers: the run's states one after the other, the last for ever, and its log."""

    def __init__(self) -> None:
        self.name = "brave-owl"
        self.states: list[State[Any]] = [Running(), Completed()]
        self.logs: list[Log] = []
        self.tags: list[str] = []
        self.refusal: tuple[int, Any] | None = None
        self.given: list[dict[str, Any]] = []
        """Parameters of the runs that were made."""
        self.failures: list[int] = []
        """Statuses that the next looks at the run get instead of an answer; 0 hangs up."""
        self.looks = 0
        self.told: set[str | None] = set()
        """Who the callers said that they are."""
        self.takes: str | None = None
        """Whom alone it answers; None: everybody."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                self.answer()

            def do_POST(self) -> None:
                self.answer()

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                server.told.add(who := self.headers.get("Authorization"))
                status, content = server.answer(self.path, json.loads(body or b"{}"))
                if server.takes not in (None, who):
                    status, content = 401, {"exception_message": "Unauthorized"}
                if status == 0:
                    self.close_connection = True
                    return
                data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/api"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, path: str, asked: dict[str, Any]) -> tuple[int, Any]:
        run = FlowRun(id=RUN_ID, flow_id=FLOW_ID, name=self.name, tags=self.tags)
        if path.endswith("/create_flow_run"):
            self.given.append(asked["parameters"])
            return self.refusal or (201, run.model_dump_json())
        if path.startswith("/api/deployments/name/"):
            return 200, DEPLOYMENT.model_dump_json()
        if path == f"/api/flow_runs/{RUN_ID}":
            self.looks += 1
            if self.failures:
                return self.failures.pop(0), {"detail": "not now"}
            state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
            return 200, run.model_copy(update={"state": state}).model_dump_json()
        if path == "/api/logs/filter":
            return 200, [json.loads(log.model_dump_json()) for log in self.page(asked)]
        return (404, {}) if path.startswith("/api/csrf-token") else (200, [])

    def page(self, asked: dict[str, Any]) -> list[Log]:
        after = ((asked["logs"] or {}).get("timestamp") or {}).get("after_")
        found = [log for log in self.logs if after is None or log.timestamp >= datetime.fromisoformat(after)]
        found.sort(key=lambda log: log.timestamp, reverse=asked["sort"] == "TIMESTAMP_DESC")
        offset = asked["offset"] or 0
        return found[offset : offset + min(asked["limit"] or 200, 200)]  # the server's own limit

    def write(self, *lines: str, ago_s: float = 0.0) -> None:
        for line in lines:
            stamp = datetime.now(UTC) - timedelta(seconds=ago_s)
            self.logs.append(Log(name="n", level=20, message=line, timestamp=stamp, flow_run_id=RUN_ID))

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    assert not home.exists()
    server = Server()
    monkeypatch.setenv("PREFECT_API_URL", server.url)
    monkeypatch.delenv("PREFECT_API_AUTH_STRING", raising=False)
    yield server
    server.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RLHF_ENV_FILE", str(tmp_path / ".env"))
    monkeypatch.setenv("RLHF_STORE_URL", (tmp_path / "store").as_uri())
    monkeypatch.setattr(verb, "LOOK_S", 0.01)
    return tmp_path / "home"


@pytest.fixture
def rlhf_run(home: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that types `rlhf run quickstart`, and returns its status and what it said."""
    del home

    def run(*more: str) -> tuple[int, str, str]:
        status = cli.main(["run", "quickstart", *more])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_a_server_that_is_away_is_one_sentence(
    rlhf_run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # bound, and nobody listens
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}/api"
        monkeypatch.setenv("PREFECT_API_URL", url)
        status, _, error = rlhf_run()
    assert status == 1
    assert re.fullmatch(rf"rlhf: the Prefect server at {url} does not answer \(.+\); run `rlhf up`, .*\n", error)


def test_a_server_of_ones_own_is_told_who_we_are_and_its_refusal_is_one_sentence(
    rlhf_run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "me:word")
    server.takes = "Basic bWU6d29yZA=="  # base64 of me:word
    assert rlhf_run()[0] == 0
    assert server.told == {server.takes}
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "me:wrong")
    status, _, error = rlhf_run()
    assert (status, error) == (
        1,
        f"rlhf: the Prefect server at {server.url} does not take PREFECT_API_AUTH_STRING as it is exported; unset it, "
        "or set it to its user:password\n",
    )


def test_the_local_server_is_told_its_own_password_and_no_header_for_another(
    rlhf_run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, server: Server, home: Path
) -> None:
    home.mkdir()
    (home / "stack.env").write_text(f"PREFECT_API_URL='{server.url}'\nPREFECT_API_AUTH_STRING='me:word'\n")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "me:elsewhere")
    monkeypatch.setenv("PREFECT_CLIENT_CUSTOM_HEADERS", '{"Authorization": "Bearer of a gateway"}')
    server.takes = "Basic bWU6d29yZA=="
    with temporary_settings({PREFECT_CLIENT_CUSTOM_HEADERS: {"Authorization": "Bearer of a gateway"}}):
        assert rlhf_run()[0::2] == (0, "")
    assert server.told == {server.takes}


@pytest.mark.parametrize("url", ["nonsense", "http://[half"])
def test_an_address_that_is_none_is_one_sentence(
    rlhf_run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", url)
    status, _, error = rlhf_run()
    assert (status, error.count("\n")) == (1, 1)
    assert f"the Prefect server at {url} does not answer" in error


def test_a_refused_parameter_is_told_in_the_servers_words(
    server: Server, rlhf_run: Callable[..., tuple[int, str, str]]
) -> None:
    server.refusal = (409, {"detail": "Error creating flow run: Validation failed for field 'seed'.\n 'x' is no int"})
    status, _, error = rlhf_run("-p", "seed=x")
    assert status == 1
    assert error == (
        "rlhf: pipeline/quickstart refuses: Error creating flow run: Validation failed for field 'seed'. "
        "'x' is no int (its parameters are preset, data, seed)\n"
    )


def test_any_other_refusal_names_the_server(server: Server, rlhf_run: Callable[..., tuple[int, str, str]]) -> None:
    server.refusal = (403, "Forbidden")
    assert rlhf_run()[::2] == (1, f"rlhf: the Prefect server at {server.url} refuses: Forbidden\n")


def test_brackets_are_shown_as_they_are(server: Server, rlhf_run: Callable[..., tuple[int, str, str]]) -> None:
    server.write("▸ sft          [prompt] [/nope] [bold]x[/bold]")
    server.states = [Running(), Failed(message="row [3] of [/data/x.jsonl] is wrong")]
    status, out, _ = rlhf_run()
    assert status == 1
    assert "▸ sft          [prompt] [/nope] [bold]x[/bold]\n" in out
    assert "Failed: row [3] of [/data/x.jsonl] is wrong\n" in out


def test_a_run_ends_with_what_its_flow_made(server: Server, rlhf_run: Callable[..., tuple[int, str, str]]) -> None:
    told = f"made sft/[b]@3; {', '.join(f'dataset/{name}@1' for name in range(20))} were in the store already"
    server.states = [Running(), Completed(message=told)]
    status, out, _ = rlhf_run()
    assert (status, out.splitlines()[-1]) == (0, f"finished: {told}")


@pytest.mark.parametrize(
    ("line", "told", "looks"),
    [
        ("▸ done         made sft/a@3", "made sft/a@3 (rlhf artifacts show sft/a@3)", 2),
        ("▸ sft          made", "made sft/a@3 (rlhf artifacts show sft/a@3)", 11),
        ("no line of progress", None, 11),
    ],
)
def test_a_run_is_looked_at_until_the_last_line_that_its_flow_writes_has_come(
    server: Server, rlhf_run: Callable[..., tuple[int, str, str]], line: str, told: str | None, looks: int
) -> None:
    server.write(line)
    server.states = [Completed(message=told)]
    asked: list[str] = []
    answer = server.answer
    server.answer = lambda path, given: asked.append(path) or answer(path, given)  # type: ignore[method-assign,func-returns-value]
    status, out, _ = rlhf_run()
    assert (status, out.count(line)) == (0, line.count("▸"))
    assert asked.count("/api/logs/filter") == looks


@pytest.mark.parametrize("state", [Completed, Failed])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_nothing_that_a_run_tells_is_obeyed_by_the_terminal(
    server: Server,
    rlhf_run: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    state: Callable[..., State[Any]],
    is_terminal: bool,
) -> None:
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    texts = [text.encode(errors="replace").decode() for text in HOSTILE.values() if len(text) < 2000]
    server.name = "".join(texts)
    server.write(*(f"▸ ppo          {text}" for text in texts))
    server.states = [Running(), state(name="".join(texts)[:200], message="\n".join(texts))]
    report = "\n\n".join(texts) + f"\n\n{block(texts)}\n\n{table(['a', 'b'], [[code(text), text] for text in texts])}"
    open_default_store().commit("run", "test", {"report.md": report.encode()}, key=str(RUN_ID))
    status, out, _ = rlhf_run()
    assert status == (0 if state is Completed else 1)
    assert "▸ ppo          ![x](http://foreign.example/a.png)\n" in out, "there was something to see"
    assert not HARMFUL.search(re.sub(r"\x1b\[[\d;]*m", "", out))


def test_what_the_stack_tells_may_hold_brackets_too(capsys: pytest.CaptureFixture[str]) -> None:
    from flows.cli.output import console
    from flows.cli.stack import _teller

    _teller(console())("deployments in [/home] [red]are[/red] ready")
    assert "deployments in [/home] [red]are[/red] ready\n" in capsys.readouterr().out


def test_no_line_is_lost_among_many(server: Server, rlhf_run: Callable[..., tuple[int, str, str]]) -> None:
    """More than a page at once, an old line that came late, and what was written just before the end."""
    wanted = [f"▸ ppo          episode {number}" for number in range(450)]
    server.write(*wanted[:430])
    answer = server.answer
    late = iter([wanted[430:440], wanted[440:]])

    def answer_later(path: str, asked: dict[str, Any]) -> tuple[int, Any]:
        if path == "/api/logs/filter" and not (asked["offset"] or 0) and (lines := next(late, None)):
            server.write(*lines, ago_s=3600)
        return answer(path, asked)

    server.answer = answer_later  # type: ignore[method-assign]
    server.states = [Running(), Running(), Completed()]
    status, out, _ = rlhf_run()
    assert status == 0
    printed = [line[9:] for line in out.splitlines() if "▸" in line]
    assert sorted(printed) == sorted(wanted)


def test_only_the_runs_own_log_is_read_which_has_its_stages_lines(
    server: Server, rlhf_run: Callable[..., tuple[int, str, str]]
) -> None:
    asked_of: list[list[str]] = []
    page = server.page

    def noting(asked: dict[str, Any]) -> list[Log]:
        asked_of.append(asked["logs"]["flow_run_id"]["any_"])
        return page(asked)

    server.page = noting  # type: ignore[method-assign]
    assert rlhf_run()[0] == 0
    assert asked_of
    assert all(runs == [str(RUN_ID)] for runs in asked_of)


def test_a_server_that_is_started_again_is_ridden_out(
    server: Server, rlhf_run: Callable[..., tuple[int, str, str]]
) -> None:
    server.failures = [0, 503, 500, 0, 429]
    server.write("▸ sft          after the storm")
    status, out, _ = rlhf_run()
    assert (status, server.failures) == (0, [])
    assert out.count("after the storm") == 1


def test_a_server_that_stays_away_is_told_with_the_runs_name(
    server: Server, rlhf_run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: float(server.looks))  # a second a look, however busy the machine is
    monkeypatch.setattr(verb, "time", clock)
    monkeypatch.setattr(verb, "AWAY_LIMIT_S", 3.0)
    server.failures = [0] * 10_000
    status, _, error = rlhf_run()
    assert status == 1
    assert error.startswith("rlhf: the Prefect server has not answered for 3 s (")
    assert f"run brave-owl ({RUN_ID}) may go on without it" in error
    assert error.count("\n") == 1
    assert server.looks > 3


def test_a_run_that_was_deleted_is_told(server: Server, rlhf_run: Callable[..., tuple[int, str, str]]) -> None:
    server.failures = [404]
    assert rlhf_run()[::2] == (
        1,
        f"rlhf: run brave-owl ({RUN_ID}) is not on the server any more: somebody has deleted it\n",
    )


@pytest.mark.parametrize(
    ("state", "notice"),
    [
        (Scheduled(), "no worker has taken the run after 0 s (see `rlhf status`); waiting"),
        (Pending(), "a worker has taken the run, but not started it after 0 s (see `rlhf status`); waiting"),
    ],
)
def test_a_run_that_nobody_starts_is_said_once_and_given_up_in_the_end(
    server: Server,
    rlhf_run: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    state: State[Any],
    notice: str,
) -> None:
    monkeypatch.setattr(verb, "UNTAKEN_NOTICE_S", 0.05)
    monkeypatch.setattr(verb, "UNSTARTED_LIMIT_S", 0.3)
    server.states = [state]
    status, out, error = rlhf_run()
    assert status == 1
    assert out.count(notice) == 1
    assert error.startswith(f"rlhf: run brave-owl ({RUN_ID}) has not started within 0 min: look with `rlhf status`")
    assert error.count("\n") == 1


def test_a_run_that_has_started_may_wait_for_its_next_try(
    server: Server, rlhf_run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("UNTAKEN_NOTICE_S", "UNSTARTED_LIMIT_S"):
        monkeypatch.setattr(verb, limit, 0.0)
    server.states = [Running(), Scheduled(name="AwaitingRetry"), Completed()]
    status, out, _ = rlhf_run()
    assert status == 0
    assert "has taken the run" not in out


def test_a_crashed_run_that_is_started_again_is_followed_to_its_end(
    server: Server, rlhf_run: Callable[..., tuple[int, str, str]]
) -> None:
    server.tags = [RESUMES]
    once = Crashed(name=RESTARTING, message="The run crashed in start 1. It is started again in 30 s.")
    twice = Crashed(name=RESTARTING, message="The run crashed in start 2.")
    first = [Running(), Crashed(), Crashed(), once, once, Scheduled(), Pending(), Running()]
    server.states = [*first, Crashed(), twice, twice, Scheduled(), Completed()]
    status, out, _ = rlhf_run()
    assert status == 0
    assert out.count("The run crashed in start 1. It is started again in 30 s.") == 1
    assert out.count("The run crashed in start 2.") == 1
    assert out.count("the run crashed; waiting up to 45 s for the server to start it again") == 2


def test_a_crash_that_a_busy_server_sees_late_is_waited_for(
    server: Server, rlhf_run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 10.0 * server.looks)
    monkeypatch.setattr(verb, "time", clock)
    server.tags = [RESUMES]
    server.states = [Running(), *[Crashed()] * 4, Crashed(name=RESTARTING, message="again"), Scheduled(), Completed()]
    assert rlhf_run()[0] == 0


@pytest.mark.parametrize(
    ("tags", "state", "limit"),
    [
        ([], Crashed(message="gone"), None),
        ([RESUMES], Crashed(message="gone"), "CRASH_LIMIT_S"),
        ([RESUMES], Crashed(name=RESTARTING, message="gone"), "RESTART_LIMIT_S"),
    ],
)
def test_a_crashed_run_that_is_not_started_again_has_ended(
    server: Server,
    rlhf_run: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tags: list[str],
    state: State[Any],
    limit: str | None,
) -> None:
    if limit is not None:
        monkeypatch.setattr(verb, limit, 0.05)
    server.tags, server.states = tags, [Running(), state]
    status, out, _ = rlhf_run()
    assert status == 1
    assert out.splitlines()[-1] == f"{state.name}: gone"
    assert out.count("for the server to start it again") == (limit == "CRASH_LIMIT_S")


def test_a_run_that_crashed_with_its_server_has_ended(
    server: Server, rlhf_run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "CRASH_LIMIT_S", 60.0)
    server.tags, server.states = [RESUMES], [Crashed(message="gone")]
    answer = server.answer

    def fall_silent(path: str, asked: dict[str, Any]) -> tuple[int, Any]:
        return (0, None) if server.looks > 2 else answer(path, asked)

    server.answer = fall_silent  # type: ignore[method-assign]
    status, out, _ = rlhf_run()
    assert (status, out.splitlines()[-1]) == (1, "Crashed: gone")


def local_stack(server: Server, home: Path) -> ServiceRecord:
    home.mkdir()
    me = ProcessRecord.of(os.getpid())  # plays the server's process: it runs
    address = server.url.removesuffix("/api")
    record = ServiceRecord(identity=me, fingerprint="", address=address, log=home / "log")
    StackState(services={"server": record}).save(home)
    return record


def test_paths_are_those_of_the_folder_where_the_command_is_typed(
    server: Server,
    rlhf_run: Callable[..., tuple[int, str, str]],
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local_stack(server, home)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    status, _, error = rlhf_run("-p", "data=mine.jsonl")
    assert (status, server.given) == (1, [])
    assert error == f"rlhf: data file {tmp_path}/work/mine.jsonl does not exist; {tmp_path}/work holds nothing\n"
    Path("mine.jsonl").write_text("{}\n")
    assert rlhf_run("-p", "data=mine.jsonl")[0] == 0
    assert server.given == [{"data": f"{tmp_path}/work/mine.jsonl"}]


def test_what_the_run_would_refuse_at_once_is_refused_before_there_is_one(
    server: Server, rlhf_run: Callable[..., tuple[int, str, str]], home: Path
) -> None:
    """Where the run reads the presets of this checkout; elsewhere they may be others."""
    assert rlhf_run("-p", "seed=-1")[0] == 0
    local_stack(server, home)
    status, _, error = rlhf_run("-p", "seed=-1")
    assert (status, len(server.given)) == (1, 1)
    assert "seed: input should be greater than or equal to 0, but it is -1\n" in error


def test_while_the_local_stack_runs_the_run_goes_there_whatever_is_exported(
    server: Server, rlhf_run: Callable[..., tuple[int, str, str]], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = local_stack(server, home)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    status, out, _ = rlhf_run()
    assert status == 0
    assert f"PREFECT_API_URL is http://127.0.0.1:9/api, but the local stack runs: the run goes to {server.url}" in out
    me = record.identity
    gone = record.model_copy(update={"identity": me.model_copy(update={"started": me.started + 1})})
    StackState(services={"server": gone}).save(home)
    status, _, error = rlhf_run()
    assert status == 1
    assert "the Prefect server at http://127.0.0.1:9/api does not answer" in error


def test_a_report_names_its_pictures_and_how_to_fetch_them(
    server: Server, tmp_path: Path, rlhf_run: Callable[..., tuple[int, str, str]]
) -> None:
    (tmp_path / "store").mkdir()
    report = b"# A run\n\n![PPO by episode](ppo.png)\n\n`![x](y.png)`\n"
    open_default_store().commit("run", "quickstart", {"report.md": report, "ppo.png": b"1"}, key=str(RUN_ID))
    status, said, _ = rlhf_run()
    assert status == 0
    assert server.looks
    assert "PPO by episode: ppo.png" in said
    assert "![x](y.png)" in said  # a model's own words stay as they are
    assert "pictures (ppo.png) and samples.md: rlhf artifacts fetch run/quickstart@1 DIRECTORY" in said

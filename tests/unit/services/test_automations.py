"""The automations of `rlhf up`: there once, as they should be, whatever was there before."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any
from uuid import uuid4

import pytest
from prefect.server.events.schemas.automations import Automation, AutomationCreate

from infra.errors import ServiceError
from infra.services import automations, doctor, prefect_api
from infra.services.prefect_yaml import read_prefect_yaml
from infra.settings import CHECKOUT, Settings

URL = "http://127.0.0.1:1/api"


class Server:
    """Keeps automations as Prefect does: with its own schema, which adds ids and defaults and forgets the order."""

    def __init__(self) -> None:
        self.automations: list[dict[str, Any]] = []
        self.changes: list[str] = []
        self.states: dict[str, str] = {"run-1": automations.RESTARTING, "run-2": "Crashed"}

    def call(
        self, api_url: str, method: str, path: str, body: Any = None, *, timeout_s: float = prefect_api.ANSWER_S
    ) -> Any:
        assert (api_url, timeout_s) == (URL, prefect_api.ANSWER_S)
        if path == "/automations/filter":
            assert body["sort"] == "CREATED_DESC"
            return copy.deepcopy(self.automations[::-1])
        if path == "/flow_runs/filter":
            asked = body["flow_runs"]["state"]["name"]["any_"]
            return [{"id": run} for run, state in self.states.items() if state in asked]
        if path.startswith("/flow_runs/"):
            assert body["force"]
            self.states[path.split("/")[2]] = body["state"]["type"].capitalize()
            return {}
        self.changes.append(method)
        number = path.removeprefix("/automations/")
        [at] = [at for at, each in enumerate(self.automations) if each["id"] == number] or [len(self.automations)]
        if method == "DELETE":
            del self.automations[at]
            return {}
        taken = Automation.model_validate({**AutomationCreate.model_validate(body).model_dump(), "id": uuid4()})
        self.automations[at : at + 1] = [taken.model_dump(mode="json") | ({"id": number} if number else {})]
        return {}

    def names(self) -> list[str]:
        return [each["name"] for each in self.automations]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr(prefect_api, "call", server.call)
    return server


def test_they_are_installed_once_however_often(server: Server) -> None:
    assert "from now on" in automations.install(URL)
    wanted = [each["name"] for each in automations.wanted()]
    assert server.names() == wanted
    assert len(set(wanted)) == len(wanted) == 7
    server.changes.clear()
    assert "as they should be" in automations.install(URL)
    assert server.changes == []
    assert automations.faults(URL) == []


def change(server: Server) -> None:
    server.automations[4]["trigger"]["within"] = 3600.0


def add_double(server: Server) -> None:
    server.automations.append({**server.automations[0], "id": str(uuid4())})


def add_old(server: Server) -> None:
    server.automations.append({**server.automations[0], "id": str(uuid4()), "name": "of an earlier version"})


def lose(server: Server) -> None:
    del server.automations[2]


def reword(server: Server) -> None:
    server.automations[1]["actions"][0]["state"] = "COMPLETED"


@pytest.mark.parametrize(
    ("damage", "mended_by", "fault"),
    [
        (change, "PUT", "'A crashed run is started again' is not as it should be"),
        (reword, "PUT", "'A run that crashed once is to be started again' is not as it should be"),
        (lose, "POST", "'A run that crashed twice is to be started again' is missing"),
        (add_double, "DELETE", None),
        (add_old, "DELETE", None),
    ],
)
def test_what_is_not_as_it_should_be_is_told_and_mended_and_nothing_else_is_touched(
    server: Server, damage: Callable[[Server], None], mended_by: str, fault: str | None
) -> None:
    automations.install(URL)
    foreign = {**server.automations[0], "id": str(uuid4()), "tags": []}
    server.automations.append(foreign)
    damage(server)
    server.changes.clear()
    assert automations.faults(URL) == ([fault] if fault else [])
    automations.install(URL)
    assert server.changes == [mended_by]
    assert automations.faults(URL) == []
    assert foreign in server.automations
    assert sorted(server.names()) == sorted([foreign["name"], *(each["name"] for each in automations.wanted())])


def test_a_users_own_with_the_former_tag_stays_and_ours_get_the_new_one(server: Server) -> None:
    automations.install(URL)
    for each in server.automations:
        each["tags"] = ["rlhf"]  # as an earlier version left them
    own = {**server.automations[0], "id": str(uuid4()), "name": "Tell me when a run ends"}
    server.automations.append(own)
    server.changes.clear()
    automations.install(URL)
    assert server.changes == ["PUT"] * 7
    assert automations.faults(URL) == []
    assert {tag for each in server.automations if each != own for tag in each["tags"]} == {"rlhf-flows:restarts"}
    automations.remove(URL)
    assert server.automations == [own]


def test_one_that_a_person_switched_off_stays_off(server: Server) -> None:
    automations.install(URL)
    server.automations[4]["enabled"] = False
    automations.install(URL)
    automations.remove(URL)
    assert server.names() == ["A crashed run is started again"]
    automations.install(URL)
    assert automations.faults(URL) == ["'A crashed run is started again' is switched off"]


def test_no_run_waits_for_what_is_removed(server: Server) -> None:
    automations.install(URL)
    assert server.states["run-1"] == automations.RESTARTING
    automations.remove(URL)
    assert server.automations == []
    assert server.states == {"run-1": "Crashed", "run-2": "Crashed"}


@pytest.mark.parametrize(
    ("ours", "faults", "verdict", "seen", "advice"),
    [
        (URL, [], "well", "runs that crash are started again, 3 times at most", ""),
        (URL, ["'A' is missing", "'B' is switched off"], "warning", "'A' is missing; 'B' is switched off", "`rlhf up`"),
        (
            None,
            ["'A' is missing"],
            "warning",
            f"{URL} is not this stack's: automation 'A'",
            "`rlhf automations` has that server start crashed runs again",
        ),
    ],
)
def test_the_doctor_says_whether_crashed_runs_are_started_again(
    monkeypatch: pytest.MonkeyPatch, ours: str | None, faults: list[str], verdict: str, seen: str, advice: str
) -> None:
    monkeypatch.setattr(doctor, "running_api_url", lambda _: ours)
    monkeypatch.setattr(automations, "faults", lambda _: faults)
    [finding] = doctor._restarts(Settings(PREFECT_API_URL=URL))
    assert (finding.name, finding.verdict) == ("restarts", verdict)
    assert seen in finding.seen
    assert advice in finding.advice


def test_the_doctor_says_nothing_of_automations_where_no_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(_: str) -> list[str]:
        raise ServiceError("the Prefect server does not answer")

    monkeypatch.setattr(automations, "faults", silent)
    monkeypatch.setattr(doctor, "running_api_url", lambda _: URL)
    assert list(doctor._restarts(Settings())) == []


def test_every_deployment_of_this_checkout_is_started_again() -> None:
    assert [name for name, each in read_prefect_yaml(CHECKOUT).items() if automations.RESUMES not in each.tags] == []


class CrashedRuns:
    """A server with automations, one of which a person may have switched off, and one crashed run."""

    settles_at = 1_000_000
    """At which look the server has started a waiting run again by itself."""

    def __init__(self, *states: str, starts: int, switched_off: str = "", installed_at: int = 0) -> None:
        self.looks = 0
        self.states = [
            {
                "name": name,
                "type": "CRASHED" if name == automations.RESTARTING else name.upper(),
                "timestamp": stamp(at),
            }
            for at, name in enumerate(states, start=1)
        ]
        self.starts = starts
        self.automations = [
            {**each, "id": str(at), "created": stamp(installed_at), "enabled": each["name"] != switched_off}
            for at, each in enumerate(automations.wanted())
        ]
        for each in self.automations:
            each["actions"] = [{"name": None, **each["actions"][0]}]
        self.set: list[tuple[str, str | None]] = []

    def call(self, _: str, method: str, path: str, body: Any = None) -> Any:
        if path == "/automations/filter":
            return self.automations[::-1]
        if path == "/flow_runs/filter":
            assert body["deployments"] == {"tags": {"all_": ["resumes"]}}
            state = {**self.states[-1], "message": "as it was", "id": "former"}
            wanted = body["flow_runs"]["end_time"]
            ended = wanted["after_"] <= state["timestamp"] <= wanted["before_"]
            named = state["name"] in body["flow_runs"]["state"]["name"]["any_"]
            run = {"id": "run-1", "name": "owl", "run_count": self.starts, "state": state}
            return [run] if ended and named else []
        if path.startswith("/flow_run_states/"):
            return self.states[::-1]
        if path == "/flow_runs/run-1":
            self.looks += 1
            return {"state": {"id": "former" if self.looks < self.settles_at else "later"}}
        assert (method, path, body["force"]) == ("POST", "/flow_runs/run-1/set_state", True)
        self.set.append((body["state"]["type"], body["state"].get("name")))
        self.message = str(body["state"]["message"])
        return {}


def stamp(second: int) -> str:
    return f"2026-11-23T01:00:{second:02d}+00:00"


BEGAN = datetime.fromisoformat(stamp(30)).timestamp()
TO_RESTART = [("CRASHED", automations.RESTARTING)]


@pytest.mark.parametrize(
    ("states", "starts", "becomes", "says"),
    [
        (["Scheduled", "Running", "Crashed"], 1, TO_RESTART, "The run crashed in start 1."),
        (["Scheduled", "Pending", "Crashed"], 0, TO_RESTART, "The run crashed before it began."),
        (
            ["Running", "Crashed", "Restarting", "Scheduled", "Running", "Crashed"],
            2,
            TO_RESTART,
            "The run crashed in start 2.",
        ),
        (["Running", "Crashed", "Restarting"], 1, [("SCHEDULED", None)], "Started again after a crash"),
        (
            ["Running", "Crashed"],
            4,
            [("FAILED", "Failed: crashed in every start")],
            "The run crashed in start 4 and is not started again",
        ),
    ],
)
def test_what_a_killed_server_had_to_do_about_a_crash_is_done(
    monkeypatch: pytest.MonkeyPatch, states: list[str], starts: int, becomes: list[tuple[str, str | None]], says: str
) -> None:
    server = CrashedRuns(*states, starts=starts)
    monkeypatch.setattr(prefect_api, "call", server.call)
    monkeypatch.setattr(automations, "_SETTLED_S", 0.1)
    assert automations.catch_up(URL, server_began=BEGAN) == ["owl"]
    assert server.set == becomes
    assert server.message.startswith(says)


@pytest.mark.parametrize("looks", [1, 2, 5])
def test_a_run_that_the_server_starts_again_by_itself_is_not_told_to_wait_anew(
    monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    server = CrashedRuns("Running", "Crashed", "Restarting", starts=1)
    server.settles_at = looks
    monkeypatch.setattr(prefect_api, "call", server.call)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert automations.catch_up(URL, server_began=BEGAN) == []
    assert server.set == []


def test_a_run_whose_quiet_time_goes_on_is_left_to_the_server_until_well_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = CrashedRuns("Running", "Crashed", "Restarting", starts=1)
    since = datetime.fromisoformat(server.states[-1]["timestamp"]).timestamp()
    clock = [since + 10]
    with monkeypatch.context() as patch:
        patch.setattr(prefect_api, "call", server.call)
        patch.setattr(time, "time", lambda: clock[0])
        patch.setattr(time, "monotonic", lambda: clock[0])
        patch.setattr(time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
        assert automations.catch_up(URL, server_began=BEGAN) == ["owl"]
    assert server.set == [("SCHEDULED", None)]
    assert 45 <= clock[0] - since < 47  # 30 s of quiet, and 15 s in which the server would have done it


@pytest.mark.parametrize(
    ("states", "further"),
    [
        pytest.param(["Running", "Crashed", "Restarting", "Scheduled", "Crashed"], {}, id="before it began again"),
        pytest.param(["Running", "Completed"], {}, id="it has ended"),
        pytest.param(["Running", "Crashed"], {"installed_at": 20}, id="before the automations, as by `rlhf down`"),
        pytest.param(
            ["Running", "Crashed"],
            {"switched_off": "A run that crashed once is to be started again"},
            id="a person does not want it",
        ),
        pytest.param(
            ["Running", "Crashed", "Restarting"], {"switched_off": "A crashed run is started again"}, id="nor this"
        ),
        pytest.param(["Scheduled"] * 40 + ["Running", "Crashed"], {}, id="this server knows of it"),
    ],
)
def test_no_other_run_is_touched(monkeypatch: pytest.MonkeyPatch, states: list[str], further: dict[str, Any]) -> None:
    server = CrashedRuns(*states, starts=1, **further)
    monkeypatch.setattr(prefect_api, "call", server.call)
    assert automations.catch_up(URL, server_began=BEGAN) == []
    assert server.set == []


def test_a_server_without_automations_is_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    server = CrashedRuns("Running", "Crashed", starts=1)
    server.automations.clear()
    monkeypatch.setattr(prefect_api, "call", server.call)
    assert automations.catch_up(URL, server_began=BEGAN) == []


NOT_AGAIN = "The run crashed, and the local stack was ended before it was started again."


@pytest.mark.parametrize(
    ("states", "starts", "becomes", "says"),
    [
        (["Running", "Crashed"], 1, [("CRASHED", None)], NOT_AGAIN),
        (["Running", "Crashed", "Restarting"], 1, [("CRASHED", None)], NOT_AGAIN),
        (
            ["Running", "Crashed"],
            4,
            [("FAILED", "Failed: crashed in every start")],
            "The run crashed in start 4 and is not started again",
        ),
        (["Running", "Crashed", "Restarting", "Scheduled", "Crashed"], 1, [], ""),
        (["Running", "Completed"], 1, [], ""),
    ],
)
def test_what_crashed_while_automations_were_removed_says_that_it_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, states: list[str], starts: int, becomes: list[tuple[str, str | None]], says: str
) -> None:
    server = CrashedRuns(*states, starts=starts)
    monkeypatch.setattr(prefect_api, "call", server.call)
    removed = {each["name"]: each for each in server.automations}
    automations.give_up(URL, removed, ended_since=time.time())
    assert server.set == becomes
    assert not says or server.message.startswith(says)
    server.set.clear()
    automations.give_up(URL, {}, ended_since=BEGAN)
    assert server.set == []


@pytest.mark.parametrize(
    ("states", "starts"),
    [
        (["Running", "Crashed"], 1),
        (["Running", "Crashed"], 4),
        (["Running", "Crashed", "Restarting", "Scheduled", "Crashed"], 1),
    ],
)
def test_a_run_that_crashed_as_it_was_ended_with_the_stack_says_so_and_has_not_failed(
    monkeypatch: pytest.MonkeyPatch, states: list[str], starts: int
) -> None:
    server = CrashedRuns(*states, starts=starts)
    monkeypatch.setattr(prefect_api, "call", server.call)
    crashed_at = datetime.fromisoformat(server.states[-1]["timestamp"]).timestamp()
    automations.give_up(URL, {each["name"]: each for each in server.automations}, ended_since=crashed_at - 1)
    assert server.set == [("CRASHED", None)]
    assert server.message == "The process of this run ended with the local stack."

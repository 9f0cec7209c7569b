"""What others are told: once, of a project, on one line, and without a secret."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.context import FlowRunContext
from prefect.events import Event
from prefect.settings import PREFECT_UI_URL, temporary_settings

from infra.services.notices import ASKED, FAILED, KEPT, PROMOTED
from infra.settings import Settings
from tasks import context as contexts
from tasks import events, plan
from tasks.events import LONGEST_VERDICT, event_of, note_project, tell_failure, tell_that_it_asks, tell_verdict
from tasks.plan import Asker
from tasks.results import Approval, Decision

DECISION = Decision(
    promote=True, reason="31 better", policy="policy/x@3", incumbent="policy/x@2", champion="policy/x@2",
    difference=0.1, low=0.05, high=0.15, wins=31, losses=9, p_value=0.0003, level=0.01,
)  # fmt: skip
RUN = UUID(int=7)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the server is told by a run of a deployment, in place of the server."""
    found: list[dict[str, Any]] = []
    run = SimpleNamespace(
        id=RUN, name="calm-crow", flow_id=uuid4(), deployment_id=uuid4(), tags=["nightly"], run_count=2, parameters={}
    )
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    monkeypatch.setattr(FlowRunContext, "get", lambda: SimpleNamespace(flow_run=run, flow=None))
    monkeypatch.setattr(contexts, "root_flow_run", lambda: str(RUN))
    monkeypatch.setattr(plan, "asker_of", lambda _: Asker(str(RUN), "pipeline"))
    monkeypatch.setattr(events, "_send", found.append)
    return found


def run_of(**further: Any) -> Any:
    return SimpleNamespace(**{**vars(FlowRunContext.get().flow_run), **further})  # type: ignore[union-attr]


def test_a_verdict_is_told_once_of_its_project_with_references_figures_and_the_runs_page(
    sent: list[dict[str, Any]],
) -> None:
    for _ in range(2):  # a run that is started again at its end
        tell_verdict("x", DECISION, champion="policy/x@3", report="run/x@9")
    [event] = sent
    assert event["event"] == PROMOTED
    assert event["resource"] == {"prefect.resource.id": "rlhf.project.x", "prefect.resource.name": "x"}
    assert event["payload"] == {
        "title": "x: promoted",
        "verdict": "policy/x@3 is the champion now: 31 better",
        "page": f"http://127.0.0.1:4200/runs/flow-run/{RUN}",
        "facts": {
            "policy": "policy/x@3", "incumbent": "policy/x@2", "champion": "policy/x@3", "report": "run/x@9",
            "difference": 0.1, "low": 0.05, "high": 0.15, "wins": 31, "losses": 9, "p_value": 0.0003, "level": 0.01,
            "approval": None,
        },
    }  # fmt: skip
    related = {each["prefect.resource.id"] for each in event["related"]}
    assert related >= {"rlhf.policy/x@3", "rlhf.policy/x@2", "rlhf.run/x@9", f"prefect.flow-run.{RUN}"}
    assert "prefect.tag.nightly" in related
    Event.model_validate(event)  # as Prefect has it


def test_a_run_that_asks_and_then_keeps_tells_both(sent: list[dict[str, Any]]) -> None:
    refused = Approval(is_given=False, who="anna\nsmith", why="too long *answers*")
    tell_that_it_asks("x", DECISION, "until noon")
    tell_verdict(
        "x", DECISION.model_copy(update={"promote": False, "approval": refused}), champion=None, report="r/x@1"
    )
    assert [event["event"] for event in sent] == [ASKED, KEPT]
    assert sent[0]["payload"]["verdict"] == "policy/x@3 is to be approved (until noon): 31 better"
    assert refused.told == "not approved by anna ⏎ smith: too long *answers*"


def test_a_run_killed_before_it_could_note_that_it_told_tells_an_event_of_the_same_id(
    sent: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "recorded", lambda *_, **__: None)
    for _ in range(2):
        tell_verdict("x", DECISION, champion=None, report="run/x@9")
    assert sent[0]["id"] == sent[1]["id"]


def test_a_server_or_store_that_is_away_fails_no_run(
    sent: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: object) -> None:
        raise ConnectionResetError("away")

    monkeypatch.setattr(events, "_send", away)
    tell_verdict("x", DECISION, champion=None, report="run/x@9")
    tell_failure(run_of(), "Failed", "no row")
    monkeypatch.setattr(events, "_send", sent.append)
    tell_verdict("x", DECISION, champion=None, report="run/x@9")
    assert [event["event"] for event in sent] == [PROMOTED], "it was not noted as told"


def test_a_failure_is_told_of_the_project_that_the_run_is_of_as_far_as_that_is_known(
    sent: list[dict[str, Any]],
) -> None:
    token = events._PROJECT.set(None)
    try:
        tell_failure(run_of(parameters={"preset": "llama7b"}), "Refused: no data", "no row in it")
        note_project("ours")
        tell_failure(run_of(run_count=3), "Failed: no room", "no room")
        tell_failure(run_of(deployment_id=None), "Failed: no room", "whoever called sees it")
    finally:
        events._PROJECT.reset(token)
    assert [event["resource"]["prefect.resource.name"] for event in sent] == ["llama7b", "ours"]
    assert sent[0]["event"] == FAILED
    assert sent[0]["payload"]["verdict"] == "run calm-crow: no row in it"
    assert sent[0]["payload"]["facts"] == {"run": "calm-crow", "state": "Refused: no data"}
    assert sent[0]["id"] != sent[1]["id"]


def test_what_is_told_is_limited_and_has_no_secret_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_S3_SECRET_KEY", "a-secret-of-ours")
    monkeypatch.setenv("HOOK_TOKEN", "a-secret-of-ours-and-more")
    event = event_of(KEPT, "x", f"refused a-secret-of-ours-and-more, a-secret-of-ours\x1b[2J\r\n{'y' * 9999}")
    verdict = event["payload"]["verdict"]
    assert verdict.startswith("refused ***, ***\\x1b[2J ⏎ yyy")
    assert len(verdict) < LONGEST_VERDICT + 50


def test_the_runs_page_is_where_others_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://ann:secret@127.0.0.1:4200/api")
    assert contexts.page_of(Settings(), "7") == "http://127.0.0.1:4200/runs/flow-run/7"
    with temporary_settings({PREFECT_UI_URL: "https://prefect.example.org/"}):
        assert contexts.page_of(Settings(), "7") == "https://prefect.example.org/runs/flow-run/7"

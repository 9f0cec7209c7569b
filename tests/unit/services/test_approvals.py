"""What a worker does about runs whose approval nobody gave in time."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from infra.services import prefect_api
from infra.services.approvals import APPROVAL, end_overdue_waits

URL = "http://127.0.0.1:1/api"
NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)
OVER, LATER = "2026-11-28T11:59:59.5+00:00", "2026-11-28T12:00:01+00:00"


class Server:
    """Has suspended runs, and takes answers for them."""

    def __init__(self) -> None:
        self.runs: dict[str, tuple[str, str | None]] = {}
        """By id: with which key a run was suspended, and its deadline."""
        self.knows_its_form = True
        self.answered: list[tuple[str, str, Any]] = []

    def call(self, api_url: str, method: str, path: str, body: Any = None) -> Any:
        assert api_url == URL
        if path == "/flow_runs/filter":
            runs = [] if body["offset"] else self.runs.items()
            details = {run: {"type": "PAUSED", "state_details": {"pause_key": key}} for run, (key, _) in runs}
            return [{"id": run, "name": f"run {run}", "state": state} for run, state in details.items()]
        _, _, run, what = path.split("/", 3)
        if method == "GET":
            assert what == "input/approval-deadline"
            return self.runs[run][1]
        self.answered.append((run, what, body))
        return {"status": "ACCEPT" if self.knows_its_form else "REJECT"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    found = Server()
    monkeypatch.setattr(prefect_api, "call", found.call)
    return found


def test_only_runs_that_ask_and_whose_deadline_has_passed_are_answered_for(server: Server) -> None:
    server.runs = {"a": (APPROVAL, OVER), "b": (APPROVAL, LATER), "c": ("1", OVER), "d": (APPROVAL, None)}
    assert end_overdue_waits(URL, now=NOW) == ["run a"]
    [(run, what, body)] = server.answered
    assert (run, what) == ("a", "resume")
    assert body == {
        "run_input": {
            "answer": "refuse",
            "name": "nobody",
            "reason": "nobody had answered by 2026-11-28 11:59 UTC",
        }
    }


def test_a_run_that_was_killed_before_it_could_say_what_an_answer_looks_like_goes_on_without_one(
    server: Server,
) -> None:
    server.runs, server.knows_its_form = {"a": (APPROVAL, OVER)}, False
    assert end_overdue_waits(URL, now=NOW) == ["run a"]
    assert [what for _, what, _ in server.answered] == ["resume", "set_state"]
    assert server.answered[1][2]["state"]["type"] == "SCHEDULED"

"""A person's approval before a promotion: the product's own pipeline, with stages of a few bytes, on a real stack."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.artifacts import ArtifactStore
from infra.services import prefect_api
from infra.services.approvals import end_overdue_waits
from infra.services.notices import ASKED, KEPT, PROMOTED
from infra.settings import CHECKOUT
from tests.integration.local_stack import LocalStack, wait_for
from tests.integration.receivers import Hooks, hooks
from tests.integration.test_notices import notify
from tests.night.notes import Desk, Note

pytestmark = [pytest.mark.integration, pytest.mark.stack]
SITE = "approved"


class Nights:
    """The nights of one project, each of which asks a person."""

    def __init__(self, stack: LocalStack, store: ArtifactStore, receiver: Hooks) -> None:
        self.stack, self.store, self.receiver = stack, store, receiver
        self.desk = Desk(stack.home / "night" / SITE).open()
        self.day = 0

    def waits(self, gain: int) -> str:
        """Have a night make a policy that is better by so much, and return its run once that waits."""
        self.day += 1
        self.desk.write_data(site=SITE, day=self.day, gain=gain)
        run = self.stack.start_run(f"pipeline/{SITE}")
        wait_for(lambda: self.state(run) in {"Suspended", "Failed", "Skipped"}, "the person's turn", timeout_s=600)
        assert self.state(run) == "Suspended", self.stack.message(run)
        wait_for(lambda: not self.stack.processes_of(run), "the end of the run's process", timeout_s=60)
        return run

    def state(self, run: str) -> str:
        return self.stack.history(run)[-1]

    def answer(self, run: str, **said: str) -> dict[str, Any]:
        """Answer as the run's page does, and return what the server says to that."""
        found: dict[str, Any] = prefect_api.call(
            self.stack.api_url, "POST", f"/flow_runs/{run}/resume", {"run_input": said}
        )
        return found

    def answered(self, run: str, answer: str, reason: str = "it reads well") -> str:
        """Answer, and return the sentence with which the run ends."""
        assert self.answer(run, answer=answer, reason=reason, name="anna")["status"] == "ACCEPT"
        return self.end(run)

    def end(self, run: str) -> str:
        wait_for(lambda: self.stack.is_over(run), "the end of the run", timeout_s=600)
        assert self.stack.run_state(run) == "COMPLETED", self.stack.message(run)
        return self.stack.message(run)

    def champion(self) -> str | None:
        return self.store.alias("policy", SITE, "champion")

    def told(self, run: str, *, count: int) -> list[str]:
        """Return which events of ours the server has of a run, in order, once it has stored so many."""
        where = {
            "event": {"prefix": ["rlhf."]},
            "related": {"id": [f"prefect.flow-run.{run}"]},
            "occurred": {"since": (datetime.now(UTC) - timedelta(hours=1)).isoformat()},
        }

        def stored() -> list[str] | None:
            page = prefect_api.call(self.stack.api_url, "POST", "/events/filter", {"filter": where, "limit": 50})
            found = [str(event["event"]) for event in reversed(page["events"])]
            return found if len(found) >= count else None

        return wait_for(stored, f"{count} events")

    def held(self, run: str) -> list[Note]:
        """Return what the process of a run notes that is held at a stage."""
        return [note for note in self.desk.notes() if note.run == run and note.what == "held"]

    def stages(self, run: str) -> list[str]:
        """Return at which stages a process of a run has been at work."""
        return [note.stage for note in self.desk.notes() if note.run == run and note.what == "begins"]


@pytest.fixture(scope="module")
def nights(stack: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nights]:
    directory = tmp_path_factory.mktemp("approval")
    yield from open_nights(stack, directory)


def open_nights(stack: LocalStack, directory: Path) -> Iterator[Nights]:
    deployment = {
        "name": SITE,
        "entrypoint": "tests/night/stub.py:pipeline",
        "tags": ["resumes", "one-at-a-time"],
        "work_pool": {"name": "rlhf"},
        "parameters": {
            "preset": "quickstart",
            "episodes": 1,
            "overrides": {"name": SITE, "gate.approval": True, "gate.approval_days": 2},
        },
    }
    file = directory / "prefect.yaml"
    file.write_text(yaml.safe_dump({"deployments": [deployment]}))
    stack.deploy_tiny_flows(CHECKOUT, str(file))
    with hooks() as receiver:
        notify(stack, "add", "webhook", receiver.url("/hook"), "--name", SITE)
        yield Nights(stack, stack.store(directory / "cache"), receiver)
        notify(stack, "remove", SITE)


def test_a_night_waits_without_a_process_until_a_person_approves_and_is_told_of_once(nights: Nights) -> None:
    run = nights.waits(gain=1)
    assert (nights.champion(), nights.told(run, count=1)) == (None, [ASKED])
    assert nights.answer(run)["status"] == nights.answer(run, answer="yes", reason="r", name="n")["status"] == "REJECT"
    before = len(nights.stages(run))
    end = nights.answered(run, "approve", "reads *well*\nto me")
    assert end.startswith(f"promoted: policy/{SITE}@1 against sft/{SITE}@1 (sft): ")
    assert "; approved by anna: reads *well* ⏎ to me (" in end
    assert nights.champion() == f"policy/{SITE}@1"
    [move] = nights.store.aliases("policy", SITE)["champion"].history
    assert move.why.endswith("; approved by anna: reads *well* ⏎ to me")
    assert move.facts == {"approval": {"is_given": True, "who": "anna", "why": "reads *well*\nto me"}}
    assert nights.stages(run)[before:] == ["promote", "report"], "nothing was made or judged again"
    assert nights.told(run, count=2) == [ASKED, PROMOTED]
    hook = wait_for(lambda: [each for each in nights.receiver.at("/hook") if each["event"] == PROMOTED], "the notice")
    assert [each["page"].rpartition("/")[2] for each in hook] == [run]
    assert hook[0]["title"] == f"{SITE}: promoted"
    assert hook[0]["text"].startswith(f"policy/{SITE}@1 is the champion now: ")


def test_a_run_that_is_killed_after_its_answer_goes_on_with_it_and_asks_nobody_again(nights: Nights) -> None:
    run = nights.waits(gain=1)
    nights.desk.hold_at("promote")
    assert nights.answer(run, answer="approve", reason="fine", name="anna")["status"] == "ACCEPT"
    [note] = wait_for(lambda: nights.held(run), "the resumed run at its promotion", timeout_s=600)
    os.kill(note.pid, signal.SIGKILL)
    assert "; approved by anna: fine (" in nights.end(run)
    assert "Crashed" in nights.stack.history(run)
    assert nights.told(run, count=2) == [ASKED, PROMOTED]


def test_a_night_that_was_refused_keeps_the_champion_and_says_by_whom_and_why(nights: Nights) -> None:
    champion, run = nights.champion(), nights.waits(gain=1)
    end = nights.answered(run, "refuse", "it shouts")
    assert end.startswith("not promoted: ")
    assert "; not approved by anna: it shouts (" in end
    assert nights.champion() == champion
    assert nights.told(run, count=2) == [ASKED, KEPT]


def test_of_two_that_wait_the_later_approval_needs_a_gain_over_the_champion_of_then(nights: Nights) -> None:
    first, second, best = nights.waits(gain=1), nights.waits(gain=2), nights.waits(gain=3)
    assert nights.answered(second, "approve").startswith("promoted: ")
    champion = nights.champion()
    end = nights.answered(first, "approve")
    assert end.startswith(f"not promoted: approved by anna: it reads well; {champion} became the champion while the ")
    assert "0 better and 64 worse of 64 problems" in end
    assert nights.champion() == champion
    assert nights.answered(best, "approve").startswith("promoted: ")
    assert nights.champion() != champion


def test_a_night_that_nobody_answered_in_time_is_not_approved(nights: Nights) -> None:
    champion, run, url = nights.champion(), nights.waits(gain=1), nights.stack.api_url
    assert end_overdue_waits(url, now=datetime.now(UTC) + timedelta(days=1.9)) == []
    [name] = end_overdue_waits(url, now=datetime.now(UTC) + timedelta(days=2))
    assert end_overdue_waits(url, now=datetime.now(UTC) + timedelta(days=2)) == []
    assert "; not approved by nobody: nobody had answered by 20" in nights.end(run)
    assert name
    assert nights.champion() == champion


def test_a_run_that_was_put_into_another_state_without_an_answer_is_not_approved(nights: Nights) -> None:
    run = nights.waits(gain=1)
    nights.stack.set_state(run, "SCHEDULED")
    assert "; not approved by nobody: the run went on without an answer" in nights.end(run)
    assert nights.told(run, count=2) == [ASKED, KEPT]

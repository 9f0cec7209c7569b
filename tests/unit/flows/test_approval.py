"""What comes of a person's answer, and of a champion that changed while it was waited for."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect.exceptions import Pause, PrefectHTTPStatusError

from flows import approval
from flows.approval import Answer, Night, as_approved, check_can_ask
from infra.artifacts import ArtifactStore, open_default_store
from infra.services.approvals import DEADLINE
from rlhf_core.config import DataConfig, GateConfig, PipelineConfig
from rlhf_core.errors import ConfigError
from rlhf_core.evaluation import Outcome, outcomes_to_jsonl
from tasks.promote import gate, promote
from tasks.results import Decision, Parent, StageResult
from tasks.stages import stage_result

CONFIG = PipelineConfig(name="x", data=DataConfig(task="gcd"), gate=GateConfig(nights_a_year=1, approval=True))
RESPONSE = "suspended-approval-response"
ANNA = {"answer": "approve", "reason": "reads well", "name": "anna"}
PROBLEMS = 60


class Desk:
    """A store with policies, and a server that keeps what a run is told."""

    def __init__(self, store: ArtifactStore) -> None:
        self.store = store
        self.inputs: dict[str, Any] = {}
        self.right: dict[str, int] = {}
        self.suspends: Callable[[], Any] = lambda: pytest.fail("nobody is to be asked")
        self.left = 0

    def policy(self, right: int) -> str:
        """Store a policy that solves so many problems."""
        uri = self.store.commit("policy", "x", {"w": f"{right} {len(self.right)}".encode()}).uri
        self.right[uri] = right
        return uri

    def evaluate(self, _: object, policy: Parent, *__: object, **___: object) -> StageResult:
        right = self.right[policy.uri]
        outcomes = [
            Outcome(
                key=str(at), prompt="p", answer="a", response="r", correct=at < right, well_formed=True,
                truncated=False, score=float(at < right), failure="",
            )
            for at in range(PROBLEMS)
        ]  # fmt: skip
        figures = {"policy": policy.uri, "policy_digest": policy.digest, "judge": "exact"}
        made = self.store.commit(
            "evaluation",
            "x",
            {"outcomes.jsonl": outcomes_to_jsonl(outcomes)},
            metrics=figures,
            config={"of": policy.uri},
        )
        return stage_result("evaluate", self.store.resolve(made), reused=False)

    def evaluated(self, uri: str) -> StageResult:
        return self.evaluate(None, Parent(uri=uri, digest=self.store.resolve(uri).digest))

    def night(self, policy: str) -> Night:
        """Return the night of a policy that the gate promotes in place of the champion."""
        roles = {"champion": self.evaluated(self.champion), "ppo": self.evaluated(policy)}
        decision = gate.fn(CONFIG, roles)
        assert decision.promote
        stages = [roles["ppo"], stage_result("ppo", self.store.resolve(policy), reused=False)]
        return Night(CONFIG, stages, roles, decision, None, 1.0)

    @property
    def champion(self) -> str:
        found: str | None = self.store.alias("policy", "x", "champion")
        return found or ""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    (tmp_path / "store").mkdir()
    for name, value in (("HOME", tmp_path / "home"), ("ENV_FILE", tmp_path / ".env")):
        monkeypatch.setenv(f"RLHF_{name}", str(value))
    monkeypatch.setenv("RLHF_STORE_URL", (tmp_path / "store").as_uri())
    found = Desk(open_default_store())
    found.store.set_alias(found.policy(0), "champion", why="the first", who="we")
    monkeypatch.setattr(approval, "evaluate_policy", found.evaluate)
    monkeypatch.setattr(approval, "find_judge", lambda *_: None)
    monkeypatch.setattr(approval, "gate", gate.fn)
    monkeypatch.setattr(approval, "read_flow_run_input", found.inputs.get)
    monkeypatch.setattr(approval, "create_flow_run_input", found.inputs.__setitem__)
    monkeypatch.setattr(approval, "suspend_flow_run", lambda *_, **__: found.suspends())
    monkeypatch.setattr(approval, "leave_deployment", lambda _: setattr(found, "left", found.left + 1))
    monkeypatch.setattr(approval, "_run", lambda: None)
    return found


def test_an_approval_stands_in_the_history_and_a_refusal_promotes_nothing(desk: Desk) -> None:
    night = desk.night(desk.policy(60))
    desk.inputs[RESPONSE] = {**ANNA, "answer": "refuse", "reason": "it shouts"}
    refused = as_approved(night).decision
    assert (refused.promote, refused.reason) == (False, f"{night.decision.reason}; not approved by anna: it shouts")
    desk.inputs[RESPONSE] = ANNA
    approved = as_approved(night).decision
    assert promote.fn(approved) == night.decision.policy
    move = desk.store.aliases("policy", "x")["champion"].history[-1]
    assert move.why == f"{night.decision.reason}; approved by anna: reads well"
    assert move.facts == {"approval": {"is_given": True, "who": "anna", "why": "reads well"}}


def test_who_is_approved_later_needs_a_gain_over_the_champion_of_then(desk: Desk) -> None:
    little, best, less = (desk.night(desk.policy(right)) for right in (33, 60, 31))
    desk.inputs[RESPONSE] = ANNA
    assert promote.fn(as_approved(desk.night(desk.policy(30))).decision) == desk.champion
    first = desk.champion

    for night, gain in ((little, "+0.050"), (less, "+0.017")):
        kept = as_approved(night).decision
        assert (kept.promote, kept.incumbent, kept.champion, kept.challenge) == (False, first, first, None)
        assert kept.reason.startswith(
            f"approved by anna: reads well; {first} became the champion while the answer was waited for; "
            f"{night.decision.policy} against {first} (champion): {gain} "
        )
        assert promote.fn(kept) == first
    again = as_approved(best)
    won = again.decision
    assert (won.promote, won.policy, won.champion) == (True, best.decision.policy, first)
    assert again.evaluations["champion"].metrics["policy"] == first, "its report shows whom it was compared with"
    assert promote.fn(won) == best.decision.policy


def test_who_was_made_champion_by_hand_meanwhile_is_not_promoted_again(desk: Desk) -> None:
    night = desk.night(desk.policy(60))
    desk.store.set_alias(night.decision.policy, "champion", why="I like it", who="bob")
    desk.inputs[RESPONSE] = ANNA
    decision = as_approved(night).decision
    assert not decision.promote
    assert "is the champion already, since" in decision.reason


def test_a_run_asks_once_and_leaves_its_deployment_before_it_waits(desk: Desk) -> None:
    night = desk.night(desk.policy(60))

    def pause() -> None:
        assert desk.left == 1
        raise Pause

    desk.suspends = pause
    with pytest.raises(Pause):
        as_approved(night)
    until = datetime.fromisoformat(desk.inputs[DEADLINE])
    desk.suspends = lambda: Answer(**ANNA)  # type: ignore[arg-type]  # it goes on
    assert as_approved(night).decision.promote
    assert datetime.fromisoformat(desk.inputs[DEADLINE]) == until


def test_a_run_that_prefect_suspends_again_although_its_form_is_there_waits(desk: Desk) -> None:
    request = httpx.Request("POST", "http://127.0.0.1:1")

    def conflict(status: int) -> Any:
        raise PrefectHTTPStatusError("no", request=request, response=httpx.Response(status, request=request))

    desk.suspends = lambda: conflict(409)
    with pytest.raises(Pause):
        as_approved(desk.night(desk.policy(60)))
    desk.suspends = lambda: conflict(422)
    with pytest.raises(PrefectHTTPStatusError):
        as_approved(desk.night(desk.policy(60)))


def test_a_deadline_that_was_stored_though_its_answer_was_lost_counts(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = httpx.Request("POST", "http://127.0.0.1:1")

    def stored_before(key: str, value: str) -> None:
        desk.inputs[key] = value
        raise PrefectHTTPStatusError("there", request=request, response=httpx.Response(409, request=request))

    monkeypatch.setattr(approval, "create_flow_run_input", stored_before)
    desk.suspends = lambda: Answer(**ANNA)  # type: ignore[arg-type]  # it goes on
    assert as_approved(desk.night(desk.policy(60))).decision.promote


def test_a_run_that_goes_on_without_an_answer_is_not_approved(desk: Desk) -> None:
    desk.suspends = lambda: Answer.model_validate({})
    decision = as_approved(desk.night(desk.policy(60))).decision
    assert not decision.promote
    assert decision.reason.endswith("; not approved by nobody: the run went on without an answer")


def test_nobody_is_asked_where_the_gate_keeps_or_no_approval_is_wanted(desk: Desk) -> None:
    night = desk.night(desk.policy(60))
    kept: Decision = night.decision.model_copy(update={"promote": False})
    assert as_approved(night._replace(decision=kept)).decision == kept
    off = CONFIG.model_copy(update={"gate": GateConfig()})
    assert as_approved(night._replace(config=off)).decision == night.decision


@pytest.mark.parametrize(
    ("run", "can"),
    [
        (SimpleNamespace(deployment_id="d", parent_task_run_id=None), True),
        (SimpleNamespace(deployment_id="d", parent_task_run_id="t"), False),
        (SimpleNamespace(deployment_id=None, parent_task_run_id=None), False),
    ],
)
def test_only_a_run_of_a_deployment_can_ask(monkeypatch: pytest.MonkeyPatch, run: object, can: bool) -> None:
    monkeypatch.setattr(approval, "_run", lambda: run)
    check_can_ask(CONFIG.model_copy(update={"gate": GateConfig()}))
    if can:
        check_can_ask(CONFIG)
    else:
        with pytest.raises(ConfigError, match="start it with `rlhf run`") as refused:
            check_can_ask(CONFIG)
        assert refused.value.ends_as == "Refused: nobody can be asked"

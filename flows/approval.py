"""A person's approval between the gate and the promotion, where `gate.approval` asks for it (docs/adr/0053).

The run is suspended: its cluster has ended with PPO, its process ends now, and its deployment is free for the next
night. The answer, given on the run's page, starts it again with what it had made and decided. A deadline answers in
nobody's name. The champion may be another one by then: only who is better than that one is promoted.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Literal, NamedTuple

from prefect import suspend_flow_run
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import Pause, PrefectHTTPStatusError
from prefect.input import RunInput
from prefect.input.actions import create_flow_run_input, read_flow_run_input
from prefect.input.run_input import keyset_from_base_key
from pydantic import Field, ValidationError

from flows.end import unfinished
from infra.services.approvals import APPROVAL, DEADLINE, NOBODY
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ConfigError
from rlhf_core.escaping import prose
from tasks.arrivals import count_as_learnt
from tasks.context import open_context
from tasks.evaluate import evaluate_policy, find_judge
from tasks.events import tell_that_it_asks
from tasks.one_process import leave_deployment
from tasks.plan import recalled, recorded, settled_once
from tasks.progress import say
from tasks.projects import champion_of
from tasks.promote import gate
from tasks.results import Approval, Decision, Parent, StageResult

WAITS = "waits for approval"
_LONGEST_REASON = 1500


class Night(NamedTuple):
    """What a night has made and decided, before anything is promoted."""

    config: PipelineConfig
    stages: list[StageResult]
    """In order: the dataset is the first, the policy the last."""
    evaluations: dict[str, StageResult]
    decision: Decision
    reward_model: str | None
    worked_s: float
    """Seconds until then."""


class Answer(RunInput):
    """What a person is asked on the run's page."""

    answer: Literal["approve", "refuse"]
    """Whether the policy is to be the champion."""
    reason: str = Field(min_length=1, max_length=500)
    """It stands in the champion's history and in the report."""
    name: str = Field(min_length=1, max_length=100)
    """Who you are: Prefect does not say."""


def check_can_ask(config: PipelineConfig) -> None:
    """Refuse a run that is to ask a person, and cannot wait for one.

    Raises:
        ConfigError: it is no run of a deployment, or is part of another.
    """
    if not config.gate.approval:
        return
    run = _run()
    if run.deployment_id is None or run.parent_task_run_id is not None:
        raise ConfigError(
            "gate.approval asks a person before a promotion, and only a run of a deployment can wait for one; start it "
            "with `rlhf run`, or leave gate.approval off",
            ends_as="Refused: nobody can be asked",
        )


def _run() -> FlowRun:
    here = FlowRunContext.get()
    assert here is not None
    assert here.flow_run is not None, "a flow asks"
    return here.flow_run


def night_that_waited() -> Night | None:
    """Return what this run had made and decided when it asked a person; None if it has not."""
    found: Night | None = recalled(open_context(), WAITS, Night)
    return found


def as_approved(night: Night) -> Night:
    """Return a night as the gate decided it, or as it is decided where a person is to be asked before a promotion.

    Raises:
        Pause: nobody has answered yet; the run is started again by the answer.
    """
    decision = night.decision
    if not (decision.promote and night.config.gate.approval):
        return night
    said = _ask(night)
    say("gate", said.told)
    if not said.is_given:
        reason = f"{decision.reason}; {said.told}"
        return night._replace(
            decision=decision.model_copy(update={"promote": False, "reason": reason, "approval": said})
        )
    # a run that is killed after it has promoted must not meet its own champion here
    decided: Night = settled_once(
        open_context(), "night as approved", Night, lambda: _against_the_champion_of_now(night, said)
    )
    return decided


def _ask(night: Night) -> Approval:
    """Return a person's answer, or suspend the run until there is one.

    Prefect forgets that a run was suspended when it crashes later, but not what was answered.
    """
    if (given := read_flow_run_input(keyset_from_base_key(f"suspended-{APPROVAL}")["response"])) is not None:
        return _approval(Answer.model_validate(given))
    until = _deadline(night.config.gate.approval_days)
    told = f"until {until:%Y-%m-%d %H:%M} UTC, with the button Resume of the run's page"
    if night_that_waited() is None:
        recorded(open_context(), WAITS, Night, night)
        say("gate", f"{night.decision.policy} waits for a person's approval, {told}")
    tell_that_it_asks(night.config.name, night.decision, told)
    if not unfinished(night.stages[-1]):
        count_as_learnt(night.config, night.stages[0])  # the next night does not wait for the answer
    leave_deployment(_run())
    try:
        return _approval(suspend_flow_run(_form(night, told), key=APPROVAL))
    except ValidationError:  # somebody put the run into another state, and gave no answer
        return Approval(is_given=False, who=NOBODY, why="the run went on without an answer")
    except PrefectHTTPStatusError as error:
        if error.response.status_code != HTTPStatus.CONFLICT:
            raise
        raise Pause from error  # it is suspended once more, and its form is there already


def _approval(given: Answer) -> Approval:
    return Approval(is_given=given.answer == "approve", who=given.name, why=given.reason)


def _form(night: Night, told: str) -> type[Answer]:
    """Return what the run's page asks, below what there is to know."""
    decision = night.decision
    evaluation = next(each.uri for each in night.evaluations.values() if each.metrics["policy"] == decision.policy)
    return Answer.with_initial_data(
        description=f"**Is {prose(decision.policy)} to be the champion of {prose(night.config.name)}?** "
        f"{prose(decision.reason, _LONGEST_REASON)}. Its answers: `rlhf artifacts show {evaluation}`. "
        f"Waits {told}; then it is not approved."
    )


def _deadline(days: float) -> datetime:
    """Return until when the run waits, which is settled when it first asks: a worker looks for it there."""
    found: object = read_flow_run_input(DEADLINE)
    if found is None:
        found = (datetime.now(UTC) + timedelta(days=days)).isoformat()
        try:
            create_flow_run_input(DEADLINE, found)
        except PrefectHTTPStatusError as error:  # a first try was stored, and its answer lost
            if error.response.status_code != HTTPStatus.CONFLICT:
                raise
            found = read_flow_run_input(DEADLINE)
    return datetime.fromisoformat(str(found))


def _against_the_champion_of_now(night: Night, said: Approval) -> Night:
    """Return what comes of an approval: the promotion, if the policy is better than who is champion by now.

    Whoever that is has answered other problems, perhaps, so it gets those of this night, as the policy did.
    """
    context, config, decision = open_context(), night.config, night.decision
    policy = context.store.resolve(decision.policy)
    champion = champion_of(context, config, policy.name)
    if champion is None or champion.ref.uri == decision.champion:
        approved = decision.model_copy(update={"reason": f"{decision.reason}; {said.told}", "approval": said})
        return night._replace(decision=approved)
    dataset, judge = night.stages[0].parent, find_judge(config, night.reward_model)
    ours = Parent(uri=decision.policy, digest=policy.digest)
    theirs = Parent(uri=champion.ref.uri, digest=champion.digest)
    evaluations = {
        **{role: found for role, found in night.evaluations.items() if role == "base"},
        "ppo": evaluate_policy(config, ours, dataset, judge),
        "champion": evaluate_policy(config, theirs, dataset, judge, beside=ours),
    }
    again = gate(config, evaluations, f"decision against {champion.ref.uri}")
    since = f"{champion.ref.uri} became the champion while the answer was waited for"
    reason = f"{said.told}; {since}; {again.reason}"
    again = again.model_copy(update={"reason": reason, "approval": said, "challenge": None})
    return night._replace(decision=again, evaluations=evaluations)

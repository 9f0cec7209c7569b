"""What others are told of a project, as events of the Prefect server: who is champion, who is asked, and what failed.

Each is about the resource `rlhf.project.<name>`, so that automations can wait for it; `rlhf notify` sends them on
(`infra/services/notices.py`). An event has an id of its own and a record in the store: a run that is started again
tells nothing twice. A server that is away is waited for as a run waits for it, and fails no run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4, uuid5

from infra.services.notices import ASKED, EVENTS, FAILED, KEPT, PROMOTED
from infra.settings import secrets, settings, without_secrets
from rlhf_core.escaping import SHOWN_LENGTH, one_line
from tasks.context import open_context, page_of
from tasks.plan import recalled, recorded
from tasks.results import Decision
from tasks.showing import only_shows

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

LONGEST_VERDICT = 1500
"""Characters of a sentence that are told."""
_OURS = UUID("2b1f9f5e-0d0c-4f5c-9c43-5d7f4a1e8b10")
_PROJECT: ContextVar[str | None] = ContextVar("project", default=None)
"""Of the run that goes on here, once it is known."""
_FIGURES = {"policy", "incumbent", "difference", "low", "high", "wins", "losses", "p_value", "level", "approval"}


def note_project(name: str) -> None:
    """Let a failure of this run be told of a project."""
    _PROJECT.set(name)


def event_of(
    name: str,
    project: str,
    verdict: str,
    *,
    artifacts: Iterable[str | None] = (),
    page: str | None = None,
    facts: dict[str, Any] | None = None,
    related: Iterable[dict[str, str]] = (),
    once: str | None = None,
) -> dict[str, Any]:
    """Return an event as the server takes it; its verdict is on one line, limited, and has no secret of the settings.

    Args:
        name: one of `infra.services.notices.EVENTS`.
        project: it is about.
        verdict: the sentence.
        artifacts: references of what it is about.
        page: address of the run's page.
        facts: figures and references, plain.
        related: further resources.
        once: the same for events of which the server is to keep one.
    """
    known = secrets()
    resources = [
        {"prefect.resource.id": f"rlhf.{uri}", "prefect.resource.role": uri.partition("/")[0]}
        for uri in dict.fromkeys(artifacts)
        if uri
    ]
    return {
        "id": str(uuid5(_OURS, f"{name} {once}") if once else uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "event": name,
        "resource": {"prefect.resource.id": f"rlhf.project.{project}", "prefect.resource.name": project},
        "related": [*resources, *related],
        "payload": {
            "title": f"{project}: {EVENTS[name]}",
            "verdict": one_line(without_secrets(verdict, known), LONGEST_VERDICT),
            "page": page,
            "facts": json.loads(without_secrets(json.dumps(facts or {}), known)),
        },
    }


@only_shows("the event that a person is asked")
def tell_that_it_asks(project: str, decision: Decision, told: str) -> None:
    """Tell that a run waits for a person's approval.

    Args:
        project: whose champion the policy would be.
        decision: the gate's.
        told: until when it waits, and where the answer is given.
    """
    _tell_once(ASKED, project, f"{decision.policy} is to be approved ({told}): {decision.reason}", decision)


@only_shows("the event of the verdict")
def tell_verdict(project: str, decision: Decision, *, champion: str | None, report: str) -> None:
    """Tell what became of the night's policy.

    Args:
        project: whose champion it is, or is not.
        decision: the gate's, with a person's where one was asked.
        champion: after the decision.
        report: reference of the report.
    """
    verdict = f"{decision.policy} is {'the champion now' if decision.promote else 'not promoted'}: {decision.reason}"
    name = PROMOTED if decision.promote else KEPT
    _tell_once(name, project, verdict, decision, champion=champion, report=report)


def _tell_once(name: str, project: str, verdict: str, decision: Decision, **references: str | None) -> None:
    """Tell it unless the run has done so: one that is killed just between the two tells what the server knows."""
    from prefect.context import FlowRunContext

    context, here = open_context(), FlowRunContext.get()
    if here is None or here.flow_run is None or recalled(context, f"told {name}", bool, by_all=True):
        return
    event = event_of(
        name,
        project,
        verdict,
        artifacts=[decision.policy, decision.incumbent, *references.values()],
        page=page_of(context.settings, context.flow_run),
        facts={**decision.model_dump(mode="json", include=_FIGURES), **references},
        related=_related(here.flow_run),
        once=str(here.flow_run.id),
    )
    _send(event)
    recorded(context, f"told {name}", bool, answer=True, by_all=True)


@only_shows("the event of the failure")
def tell_failure(run: FlowRun, how: str, verdict: str) -> None:
    """Tell that the run of a deployment has failed; whoever calls a flow sees it.

    Args:
        run: the outermost.
        how: name of its state.
        verdict: its sentence.
    """
    if run.deployment_id is None:
        return
    given = run.parameters
    project = _PROJECT.get() or one_line(str(given.get("name") or given.get("preset") or "unknown"), SHOWN_LENGTH)
    event = event_of(
        FAILED,
        project,
        f"run {run.name}: {verdict}",
        page=page_of(settings(), str(run.id)),
        facts={"run": run.name, "state": how},
        related=_related(run),
        once=f"{run.id} {run.run_count}",
    )
    _send(event)


def _related(run: FlowRun) -> list[dict[str, str]]:
    about = [("flow-run", f"prefect.flow-run.{run.id}"), ("flow", f"prefect.flow.{run.flow_id}")]
    about += [("deployment", f"prefect.deployment.{run.deployment_id}")] if run.deployment_id else []
    about += [("tag", f"prefect.tag.{tag}") for tag in run.tags]
    return [{"prefect.resource.id": each, "prefect.resource.role": role} for role, each in about]


def _send(event: dict[str, Any]) -> None:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:  # unlike Prefect's own events, it waits for a server that is away
        client.request("POST", "/events", json=[event])

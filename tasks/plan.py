"""A run is what it was when it began: what it resolves is recorded under its id, and a later start takes that.

Whatever is stored, promoted, edited or deployed beside a run, its restart goes on with the same configuration, data and
models (docs/adr/0028-a-run-is-what-it-was.md). A new run resolves them again. Outside Prefect nothing is recorded.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from infra.errors import StoreError
from tasks.context import Context

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun
    from prefect.context import FlowRunContext

T = TypeVar("T")

_READABLE = 60
_STRANGE = re.compile(r"[^a-z0-9]+")


class Asker(NamedTuple):
    """Who asks: a call of a flow, in the run that is started again as a whole."""

    run: str
    """Id of the flow run that a restart starts again: the outermost one, or that of a deployment that a flow called."""
    call: str
    """Tells apart the calls of flows in it: the flow's name, of one that another flow called with its arguments."""


def settled_once(context: Context, question: str, kind: Any, answer: Callable[[], T], *, by_all: bool = False) -> T:
    """Return what the run was told when it first asked, or else find it out and record it.

    Args:
        context: the open context.
        question: what is asked.
        kind: the answer's type, as pydantic reads and writes it.
        answer: finds it out.
        by_all: one answer for all flows of a run; else each call of a flow asks for itself.

    Raises:
        StoreError: the store is away, or the record is of no use.
    """
    found = recalled(context, question, kind, by_all=by_all)
    return recorded(context, question, kind, answer(), by_all=by_all) if found is None else found


def recalled(context: Context, question: str, kind: Any, *, by_all: bool = False) -> Any | None:
    """Return what the run was told when it first asked; None if it has not asked yet. Arguments of `settled_once`."""
    asker = asker_of(context)
    if asker is None:
        return None
    found = context.store.recall(asker.run, _name(asker, question, by_all=by_all))
    return None if found is None else _read(asker, question, kind, found.answer)


def recorded(context: Context, question: str, kind: Any, answer: T, *, by_all: bool = False) -> T:
    """Record an answer, and return it, or the one that was recorded before. Arguments of `settled_once`."""
    asker = asker_of(context)
    if asker is None:
        return answer
    told = TypeAdapter(kind).dump_python(answer, mode="json")
    found = context.store.record(asker.run, _name(asker, question, by_all=by_all), question, told)
    stands: T = _read(asker, question, kind, found.answer)
    return stands


def told_at(context: Context, question: str) -> datetime | None:
    """Return when the run was told; None if it has not asked yet. Arguments of `settled_once`."""
    asker = asker_of(context)
    found = None if asker is None else context.store.recall(asker.run, _name(asker, question, by_all=False))
    return None if found is None else found.when


def asker_of(context: Context) -> Asker | None:
    """Return who asks; None outside Prefect."""
    from prefect.context import FlowRunContext

    if context.flow_run is None:
        return None
    here = FlowRunContext.get()
    if here is None or here.flow_run is None:  # no flow of ours: a script in the environment of a run
        return Asker(context.flow_run, "")
    key = str(here.flow_run.id)
    if key not in _ASKERS:
        _ASKERS[key] = _find_asker(here, here.flow_run)
    return _ASKERS[key]


_ASKERS: dict[str, Asker] = {}
"""By flow run: to find one, the server is asked for those around it."""
_CALLS: dict[Asker, list[str]] = {}
"""By the first of them, the calls with equal arguments in this process, in order."""


def _find_asker(here: FlowRunContext, run: FlowRun) -> Asker:
    name = _readable("" if here.flow is None else here.flow.name)
    unit = _started_again_with(run)
    if str(run.id) == unit:
        return Asker(unit, name)
    # A restart calls the same flows with the same arguments, in the same order. Arguments that are the flow's defaults
    # are left out: a release may add some.
    given = json.dumps(_given(here), sort_keys=True, default=str)
    first = Asker(unit, f"{name}-{hashlib.sha256(given.encode()).hexdigest()[:8]}")
    calls = _CALLS.setdefault(first, [])
    call = str(run.parent_task_run_id)  # the same for a flow that is called again by one that is tried again
    if call not in calls:
        calls.append(call)
    number = calls.index(call) + 1
    return first if number == 1 else Asker(unit, f"{first.call}-{number}")


def _started_again_with(run: FlowRun) -> str:
    """Return the id of the run with which a flow run is started again: the one around it that a worker began."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        while run.deployment_id is None and run.parent_task_run_id is not None:
            around = client.read_task_run(run.parent_task_run_id).flow_run_id
            if around is None:
                break
            run = client.read_flow_run(around)
    return str(run.id)


def _given(here: FlowRunContext) -> Mapping[str, Any]:
    """Return the arguments of a flow that are other than its defaults, without the project's name.

    All flows of a run have that in common, and earlier releases, whose runs go on, did not hand it on.
    """
    defaults = {} if here.flow is None else inspect.signature(here.flow.fn).parameters
    given = here.parameters or {}
    return {
        name: value
        for name, value in given.items()
        if name != "name" and (name not in defaults or defaults[name].default != value)
    }


def _read(asker: Asker, question: str, kind: Any, answer: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(answer)
    except ValidationError:
        raise StoreError(
            f"the artifact store says of run {asker.run} what it began with ({question}), but in a form that this "
            "release does not read; start a new run with the same parameters"
        ) from None


def _name(asker: Asker, question: str, *, by_all: bool) -> str:
    """Return what a question is called in the store: without the call that asks, where all of a run ask the same."""
    digest = hashlib.sha256(question.encode()).hexdigest()[:8]  # paths may differ in what is not readable
    asked = f"{_readable(question)}-{digest}"
    if by_all or not asker.call:
        return asked
    number = _number(asker, question)
    return f"{asker.call}.{asked}" if number == 1 else f"{asker.call}.{asked}-{number}"


_ASKED: dict[tuple[Asker, str], list[str]] = {}
"""By who asks what, the task runs in this process that asked it, in order: a flow may call a task in a loop."""


def _number(asker: Asker, question: str) -> int:
    """Return the how many-th call of a task asks this, one that is tried again counted once; outside a task, 1."""
    task_run = _task_run()
    if task_run is None:
        return 1
    known = _ASKED.setdefault((asker, question), [])
    if task_run not in known:
        known.append(task_run)
    return known.index(task_run) + 1


def _task_run() -> str | None:
    from prefect.context import TaskRunContext

    here = TaskRunContext.get()
    return None if here is None else str(here.task_run.id)


def _readable(text: str) -> str:
    return _STRANGE.sub("-", text.lower()).strip("-")[:_READABLE] or "flow"

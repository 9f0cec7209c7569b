"""A run is what it was when it began: what it resolves is recorded under its id, and a later start takes that.

Whatever is stored, promoted, edited or deployed beside a run, its restart goes on with the same configuration, data and
models (docs/adr/0028-a-run-is-what-it-was.md). A new run resolves anew. Outside Prefect nothing is recorded.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from infra.errors import StoreError
from tasks.context import Context

T = TypeVar("T")

_READABLE = 60


def settled_once(context: Context, question: str, kind: Any, answer: Callable[[], T], *, by_all: bool = False) -> T:
    """Return what the run was told when it first asked, or else find it out and record it.

    Args:
        context: the open context.
        question: what is asked.
        kind: the answer's type, as pydantic reads and writes it.
        answer: finds it out.
        by_all: one answer for all flows of a run; else each asks for itself.

    Raises:
        StoreError: the store is away, or the record is of no use.
    """
    found = recalled(context, question, kind, by_all=by_all)
    return recorded(context, question, kind, answer(), by_all=by_all) if found is None else found


def recalled(context: Context, question: str, kind: Any, *, by_all: bool = False) -> Any | None:
    """Return what the run was told when it first asked; None if it has not asked yet. Arguments of `settled_once`."""
    if context.flow_run is None:
        return None
    found = context.store.recall(context.flow_run, _named(question, by_all))
    return None if found is None else _read(context, question, kind, found)


def recorded(context: Context, question: str, kind: Any, answer: T, *, by_all: bool = False) -> T:
    """Record an answer, and return it, or the one that stands already. Arguments of `settled_once`."""
    if context.flow_run is None:
        return answer
    told = {"is": TypeAdapter(kind).dump_python(answer, mode="json")}
    stands: T = _read(context, question, kind, context.store.record(context.flow_run, _named(question, by_all), told))
    return stands


def _read(context: Context, question: str, kind: Any, found: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(found["is"])
    except (ValidationError, KeyError, TypeError):
        raise StoreError(
            f"the artifact store says of run {context.flow_run} what it began with ({question}), but in a form that "
            "this release does not read; start a new run with the same parameters"
        ) from None


def _named(question: str, by_all: bool) -> str:
    """Return what a question is called in the store: of the flow that asks, and of what it was called with."""
    from prefect.runtime import flow_run

    asker = "" if by_all else flow_run.get_flow_name() or ""
    readable = re.sub(r"[^a-z0-9]+", "-", f"{asker} {question}".lower()).strip("-")[:_READABLE]
    # Paths may differ in what is not readable; and a flow of one's own may call `ppo` for each of several seeds.
    told = question if by_all or not asker else f"{question} {sorted(flow_run.get_parameters().items())}"
    return f"{readable}-{hashlib.sha256(told.encode()).hexdigest()[:8]}"

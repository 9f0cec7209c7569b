"""The log of the run that goes on here. Actors import it too, and have no run: Prefect is not imported for it."""

from __future__ import annotations

import logging
import sys
from typing import Any
from uuid import UUID


def run_logger() -> Any:
    """Return the run's logger inside a flow or task, an ordinary one elsewhere (tests, plain calls, actors)."""
    if "prefect" not in sys.modules:  # then nothing in this process is a run
        return logging.getLogger("rlhf")
    from prefect.exceptions import MissingContextError
    from prefect.logging import get_logger, get_run_logger

    try:
        return get_run_logger()
    except MissingContextError:
        return get_logger("rlhf")


def flow_logger() -> Any:
    """Return the logger of the flow run that goes on here, also inside one of its tasks; an ordinary one elsewhere."""
    if "prefect" in sys.modules:
        from prefect.context import FlowRunContext
        from prefect.logging.loggers import flow_run_logger

        context = FlowRunContext.get()
        if context is not None and context.flow_run is not None:
            return flow_run_logger(context.flow_run, context.flow)
    return run_logger()


def own_flow_run() -> UUID | None:
    """Return the id of the flow run that goes on here; None outside of one."""
    if "prefect" not in sys.modules:
        return None
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    return None if context is None or context.flow_run is None else context.flow_run.id

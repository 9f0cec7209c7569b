"""Whether this process still has the run that it works on: asked before what only one process may do.

Actors import it, too: no Prefect. They hold no run, and nothing is asked there.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, NoReturn

from infra.errors import LockLostError
from tasks.progress import say

if TYPE_CHECKING:
    from infra.artifacts.locks import Held

HELD: ContextVar[Held | None] = ContextVar("held", default=None)
"""The lock of the run that goes on here; `tasks.one_process` takes it."""


def leave_if_taken_over() -> None:
    """Leave the run if another process has taken it over: to be called before what only one process may do.

    Costs one small request; nothing outside a run that `one_process` guards.

    Raises:
        Abort: another has gone on with the run. Nothing in a flow catches it, and nothing is reported to the server.
        StoreError: if the store does not answer.
    """
    held = HELD.get()
    if held is None:
        return
    try:
        held.check()
    except LockLostError as error:
        leave(str(error))


def leave(why: str) -> NoReturn:
    """End this process's part of the run: its engine reports nothing, and its worker sees it end well."""
    from prefect.exceptions import Abort

    say("run", f"this process leaves the run: {why}")
    raise Abort(why)

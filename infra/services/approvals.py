"""Runs that wait for a person's approval, as the Prefect server has them, and the end of a wait that took too long.

A suspended run has no process, so a worker looks whether its deadline has passed, and then answers in nobody's name.
The server could do so by itself, but it would let the run fail.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import UTC, datetime
from typing import Any

from infra.errors import InfraError
from infra.services import prefect_api
from infra.settings import settings

APPROVAL = "approval"
"""Key of the suspension: by it the server knows that it has been, and others that it is one of these."""
DEADLINE = "approval-deadline"
"""Name of the run's input that says until when its answer is waited for, in ISO 8601."""
NOBODY = "nobody"
"""Who has answered, where the deadline did."""
LOOK_S = 300.0
logger = logging.getLogger(__name__)


def waits_for_approval(state: dict[str, Any]) -> bool:
    """Whether a state, as the server tells it, is that of a run whose promotion a person has yet to approve."""
    return bool(state["type"] == "PAUSED" and state["state_details"].get("pause_key") == APPROVAL)


def end_overdue_waits(api_url: str, *, now: datetime | None = None) -> list[str]:
    """Answer for the runs whose deadline has passed, and return their names.

    Args:
        api_url: the Prefect server's.
        now: the time; None: the clock's.

    Raises:
        ServiceError: if the server does not answer.
    """
    ended = []
    for run in prefect_api.flow_runs(api_url, {"flow_runs": {"state": {"type": {"any_": ["PAUSED"]}}}}):
        if not waits_for_approval(run["state"]):
            continue
        try:
            if _end_if_overdue(api_url, f"/flow_runs/{run['id']}", now or datetime.now(UTC)):
                ended.append(str(run["name"]))
        except InfraError as error:  # of this run alone
            logger.warning("the deadline of %s is looked at later: %s", run["name"], error)
    return ended


def _end_if_overdue(api_url: str, path: str, now: datetime) -> bool:
    until = prefect_api.call(api_url, "GET", f"{path}/input/{DEADLINE}")
    if until is None or now < datetime.fromisoformat(until):
        return False
    why = f"nobody had answered by {until[:16].replace('T', ' ')} UTC"
    answer = {"answer": "refuse", "name": NOBODY, "reason": why}
    said = prefect_api.call(api_url, "POST", f"{path}/resume", {"run_input": answer})
    if said and said["status"] == "REJECT":  # it was killed before it could say what an answer looks like
        state = {"type": "SCHEDULED", "message": "Nobody has answered."}
        prefect_api.call(api_url, "POST", f"{path}/set_state", {"state": state, "force": True})
    return True


def watch_deadlines() -> None:
    """End overdue waits in a thread, as long as this process lives."""
    threading.Thread(target=_watch, name="approvals", daemon=True).start()


def _watch() -> None:
    while True:
        time.sleep(LOOK_S)
        try:
            if api_url := settings().prefect_api_url:
                end_overdue_waits(api_url)
        except Exception as error:  # this thread is the only one that looks
            logger.warning("deadlines of approvals are looked at later: %s", error)

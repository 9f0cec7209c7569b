"""A flow with a subflow whose task meets an error, for tests of what follows from which."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from infra.errors import ClusterNotReadyError
from rlhf_core.errors import DataError
from tasks import deadlines
from tasks.context import open_context
from tasks.report.page import show_markdown
from tasks.showing import only_shows
from tasks.task_errors import in_one_sentence, stage_task

SHOWN_S = 2.0
"""How long the run waits for its page."""
FLOW_S = 3600.0
"""How long the flow may take."""


@flow(persist_result=False)
@in_one_sentence
def failing(directory: str, meets: str) -> None:
    """Run a stage that meets an error.

    Args:
        directory: where the attempts are told of.
        meets: which error: `store` opens the store, whether it is there or not.
    """

    def stages() -> None:
        stage(directory, meets)
        show()
        show()

    deadlines.in_time("the flow", FLOW_S, "nothing", stages)  # as one_process does, which would need the store first


@flow(persist_result=False)
@in_one_sentence
def stage(directory: str, meets: str) -> None:
    """Be a stage of a pipeline."""
    work(directory, meets, flow_run.get_run_count())


@stage_task(name="work")
def work(directory: str, meets: str, start: int) -> None:
    """Write down the attempt, and meet the error."""
    attempts = Path(directory) / "attempts"
    with attempts.open("a") as told:
        told.write(f"{start}\n")
    if meets == "nobody who answers":
        threading.Event().wait()
    if meets == "a call that does not come back":
        deadlines.CLEARING_UP_S = 2.0
        libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(128)
        libc.pthread_mutex_lock(lock)
        libc.pthread_mutex_lock(lock)
    if meets == "bad data":
        raise DataError("row 3 of rows.jsonl has no answer")
    if meets == "no room" and len(attempts.read_text().splitlines()) <= 2:
        raise ClusterNotReadyError("waited 1 s for room for 1 process on the Ray cluster, which has 0 CPUs free")
    open_context().store.list("policy")


@stage_task(name="show")
@only_shows("a page in Prefect", deadline_s=SHOWN_S)
def show() -> None:
    """Show a page."""
    show_markdown("page", "policy/tiny@1", "shown", seen_at_once="a page")

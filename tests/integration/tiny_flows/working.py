"""A flow that one process at a time works on, for tests of what a second start of a run does."""

from __future__ import annotations

import os
import time
from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from tasks.one_process import one_process
from tasks.taken_over import leave_if_taken_over
from tasks.task_errors import in_one_sentence, stage_task


@flow
@in_one_sentence
@one_process
def working(directory: str) -> None:
    """Write down this process and the number of the start, then work until it may end."""
    with (Path(directory) / "starts").open("a") as starts:
        starts.write(f"{os.getpid()} {flow_run.get_run_count()}\n")
    inside(directory)


@flow
@in_one_sentence
@one_process
def inside(directory: str) -> None:
    """Work."""
    work(directory)


@stage_task(name="work")
def work(directory: str) -> None:
    """Write down, again and again, who works, if it still may."""
    while not (Path(directory) / "may-end").exists():
        leave_if_taken_over()
        with (Path(directory) / "work").open("a") as work:
            work.write(f"{os.getpid()}\n")
        time.sleep(0.2)

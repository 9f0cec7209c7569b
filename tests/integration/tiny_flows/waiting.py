"""A flow with a subflow that tells of its starts and waits until it may end, for tests of what follows a crash."""

from __future__ import annotations

import os
import time
from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from tasks.one_process import one_process
from tasks.task_errors import in_one_sentence


@flow
@in_one_sentence
@one_process
def waiting(directory: str) -> None:
    """Write down this process and the number of the start."""
    with (Path(directory) / "starts").open("a") as starts:
        starts.write(f"{os.getpid()} {flow_run.get_run_count()}\n")
    inside(directory)


@flow
def inside(directory: str) -> None:
    """Wait."""
    (Path(directory) / "inside").touch()
    while not (Path(directory) / "may-end").exists():
        time.sleep(0.1)

"""A flow that tells of each process that works for a run, and waits until it may end: of one process and one run."""

from __future__ import annotations

import os
import time
from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run
from prefect.states import Completed, State

from tasks.one_process import one_process
from tasks.sentences import in_one_sentence


@flow
@in_one_sentence
@one_process
def alone(directory: str) -> State[None]:
    """Write down this process and the number of the start, and wait."""
    with (Path(directory) / "starts").open("a") as starts:
        starts.write(f"{os.getpid()} {flow_run.get_run_count()}\n")
    (Path(directory) / "inside").touch()
    while not (Path(directory) / "may-end").exists():
        time.sleep(0.1)
    return Completed(message="made a policy")

"""A flow that calls the server at every step, as a night does, for tests of a server that is away."""

from __future__ import annotations

import os
import time
from pathlib import Path

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run

from tasks.one_process import one_process
from tasks.task_errors import in_one_sentence


@flow
@in_one_sentence
@one_process
def riding(directory: str, steps: int = 0) -> None:
    """Take a step every two seconds, each in a subflow, until it may end or so many are taken; go on after a crash.

    Args:
        directory: where it tells of its starts and steps, and is told that it may end.
        steps: 0: until it is told.
    """
    inside = Path(directory)
    with (inside / "starts").open("a") as starts:
        starts.write(f"{os.getpid()} {flow_run.get_run_count()}\n")
    while not (inside / "may-end").exists():
        done = len(list(inside.glob("step-*")))
        if steps and done >= steps:
            return
        stage(directory, done)
        time.sleep(2)


@flow
def stage(directory: str, number: int) -> None:
    """Take one step, and show it."""
    step(directory, number)
    create_markdown_artifact(f"step {number}", key="riding")


@task
def step(directory: str, number: int) -> None:
    """Write down the step."""
    (Path(directory) / f"step-{number}").write_text(f"{os.getpid()} {time.time()}")
    get_run_logger().info("step %d", number)

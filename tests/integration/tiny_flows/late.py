"""A flow that waits, and takes a worker long to load when it looks for the hooks of a run that crashed."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

if "hook" in sys.argv:
    time.sleep(60)  # more than from a crash to the restart


@flow
def late(directory: str) -> None:
    """Write down this process and the number of the start, and wait until it may end."""
    with (Path(directory) / "starts").open("a") as starts:
        starts.write(f"{os.getpid()} {flow_run.get_run_count()}\n")
    (Path(directory) / "inside").touch()
    while not (Path(directory) / "may-end").exists():
        time.sleep(0.1)

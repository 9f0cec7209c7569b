"""How long a process takes before it does anything."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.speed.measure import Found, Run, in_turns, seconds_of
from infra.settings import CHECKOUT


def import_flows(run: Run) -> Found:
    """Measure a process that imports the flows; the floor imports what they stand on."""
    floor = "import prefect, pydantic"
    seconds = in_turns(run.rounds, lambda: _python("import flows.pipeline"), lambda: _python(floor))
    return Found(seconds[0], limit=seconds[1], settings={"limit": floor})


def bring_up(run: Run) -> Found:
    """Measure `rlhf up` of a stack that was up before, in a home of its own; the floor imports Prefect's server."""
    command, floor = Path(sys.executable).with_name("rlhf"), "import prefect.server.api.server"
    with TemporaryDirectory(prefix="rlhf-bench-") as home:
        own = os.environ | {"RLHF_HOME": home}
        seconds = []
        for _ in range(1 + run.rounds):
            try:
                seconds.append(seconds_of(lambda: _call(str(command), "up", environment=own)))
            finally:
                _call(str(command), "down", environment=own)
    limit = in_turns(run.rounds, lambda: _python(floor))[0]
    return Found(min(seconds[1:]), limit=limit, settings={"first": round(seconds[0], 1), "limit": floor})


def print_help(run: Run) -> Found:
    """Measure `rlhf --help`; the floor is a process that does nothing."""
    command = Path(sys.executable).with_name("rlhf")
    seconds = in_turns(run.rounds, lambda: _call(str(command), "--help"), lambda: _python("pass"))
    return Found(seconds[0], limit=seconds[1], settings={"limit": "python -c pass"})


def _python(code: str) -> None:
    _call(sys.executable, "-c", code)


def _call(*command: str, environment: Mapping[str, str] | None = None) -> None:
    subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True, timeout=120, env=environment)

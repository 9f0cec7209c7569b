"""How long a process takes before it does anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.speed.measure import Found, Run, in_turns
from infra.settings import CHECKOUT


def import_flows(run: Run) -> Found:
    """Measure a process that imports the flows; the floor imports what they stand on."""
    floor = "import prefect, pydantic"
    seconds = in_turns(run.rounds, lambda: _python("import flows.pipeline"), lambda: _python(floor))
    return Found(seconds[0], limit=seconds[1], settings={"limit": floor})


def print_help(run: Run) -> Found:
    """Measure `rlhf --help`; the floor is a process that does nothing."""
    command = Path(sys.executable).with_name("rlhf")
    seconds = in_turns(run.rounds, lambda: _call(str(command), "--help"), lambda: _python("pass"))
    return Found(seconds[0], limit=seconds[1], settings={"limit": "python -c pass"})


def _python(code: str) -> None:
    _call(sys.executable, "-c", code)


def _call(*command: str) -> None:
    subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True, timeout=120)

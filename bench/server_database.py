"""The stack's Prefect server on sqlite and on PostgreSQL, with several writers; one JSON line a round.

    python bench/server_database.py [--seconds 60] [--writers 6] [--rounds 2]

Each writer is a process that makes flow runs and takes them through their states, as fast as the server lets it.
`ratio` is sqlite's runs per second by PostgreSQL's of the same round; `cpu_s` is what server and database use for a
run, `longest_s` the longest of all calls.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.integration.local_stack import LocalStack, running

DATABASES = ("sqlite", "postgres")
WRITER = """
import asyncio, json, sys, time
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.states import Completed, Pending, Running, Scheduled

@flow
def written(): ...

async def main():
    longest, runs, end = 0.0, 0, time.monotonic() + float(sys.argv[1])

    async def timed(call):
        nonlocal longest
        began = time.monotonic()
        result = await call
        longest = max(longest, time.monotonic() - began)
        return result

    async with get_client() as client:
        while time.monotonic() < end:
            run = await timed(client.create_flow_run(written, state=Scheduled()))
            for state in (Pending(), Running(), Completed()):
                await timed(client.set_flow_run_state(run.id, state))
            runs += 1
    print(json.dumps({"runs": runs, "longest": longest}))

asyncio.run(main())
"""


def measure(database: str, *, writers: int, seconds: float) -> dict[str, float]:
    """Return what a server of its own does on a database."""
    with tempfile.TemporaryDirectory() as directory:
        dotenv = Path(directory, ".env")
        dotenv.write_text(f"RLHF_DATABASE={database}\n")
        with running(LocalStack(Path(directory, "home"), dotenv)) as stack:
            before = _cpu_s(stack)
            found = _write(stack.home, {**stack.environment, **stack.prefect_variables}, writers, seconds)
            used = _cpu_s(stack) - before
    runs = sum(each["runs"] for each in found)
    return {
        "runs_per_s": round(runs / seconds, 2),
        "cpu_s": round(used / runs, 3),
        "longest_s": round(max(each["longest"] for each in found), 2),
    }


def _write(cwd: Path, environment: Mapping[str, str], writers: int, seconds: float) -> list[dict[str, float]]:
    command = [sys.executable, "-c", WRITER, str(seconds)]
    started = [
        subprocess.Popen(command, cwd=cwd, env=dict(environment), stdout=subprocess.PIPE) for _ in range(writers)
    ]
    try:
        return [json.loads(each.communicate(timeout=10 * seconds + 120)[0].splitlines()[-1]) for each in started]
    finally:
        for each in started:
            each.kill()


def _cpu_s(stack: LocalStack) -> float:
    """Return the processor time of server and database so far, with what they have started."""
    found = 0.0
    for name, pid in stack.pids().items():
        if name in {"server", "database"}:
            for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
                times = process.cpu_times()
                found += times.user + times.system
    return found


def main() -> None:
    """Measure both in turns, and print a line for each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--writers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    for number in range(given.rounds):
        line: dict[str, Any] = {"bench": "server_database", "writers": given.writers, "load": os.getloadavg()[0]}
        for database in DATABASES if number % 2 == 0 else DATABASES[::-1]:
            line[database] = measure(database, writers=given.writers, seconds=given.seconds)
        line["ratio"] = round(line["sqlite"]["runs_per_s"] / line["postgres"]["runs_per_s"], 2)
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""`rlhf run quickstart` on a stack that is up: against the promised limits, and where its time went; JSON lines.

    rlhf up && python bench/quickstart.py

The first line has time and memory: the sum of proportional set sizes over every process of the stack and the run,
sampled each second. Then there are rows as of `bench.speed`, with what is wanted: the run, the same typed again, an
evaluation of 200 problems, and the shares of PPO's stage and of the run that are neither learning, generating nor
scoring. The exit status is the run's; 1 if a limit is missed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.comparison.runs import REPORT
from bench.speed.measure import Found, Goal, Row, Run, line_of, seconds_of
from infra.artifacts import open_default_store
from infra.services import processes
from infra.services.state import StackState
from infra.settings import settings

LIMIT_S = 15 * 60
LIMIT_BYTES = 5e9
LIMIT_ACTORS_S = 10
"""From the order to start trainer and makers until they hold the weights; none where PPO was in the store."""


def pss(process: psutil.Process) -> int:
    """Return the proportional set size of a process in bytes; 0 if it has just ended."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


def watch(stack_id: str, command: psutil.Process, peak: dict[str, int], ended: threading.Event) -> None:
    """Keep the largest sum of memory, and the shares of the processes at that moment."""
    while not ended.wait(1.0):
        seen = {each.pid: each for each in [*processes.marked(stack_id), command]}
        sizes = {each: pss(each) for each in seen.values()}
        if sum(sizes.values()) > sum(peak.values()):
            peak.clear()
            for each, size in sizes.items():
                name = each.name() if each.is_running() else "ended"
                peak[name] = peak.get(name, 0) + size


WORK, BEFORE = ("learn", "generate", "score"), ("sft", "preferences", "reward-model")
"""Phases of PPO that it is there for, and stages before it."""
DAY_S = 24 * 3600


def rows(report: dict[str, Any], *, wall_s: float, again_s: float, ppo_s: float) -> list[tuple[str, str, float, float]]:
    """Return name, unit, value and the most that is wanted.

    Args:
        report: the run's report.json.
        wall_s: seconds of the command.
        again_s: of the same command, typed again.
        ppo_s: from the end of the stage before PPO to PPO's end.
    """
    stages = {stage["stage"]: stage for stage in report["stages"]}
    evaluations = [each["seconds"] for each in report["evaluations"].values()]
    ppo = sum(stages["ppo"]["metrics"][f"seconds_{phase}"] for phase in WORK)
    all_work = ppo + sum(stages[name]["seconds"] for name in BEFORE) + sum(evaluations)
    return [
        ("quickstart", "s", wall_s, 300.0),
        ("quickstart_again", "s", again_s, 15.0),
        ("evaluation", "s", sum(evaluations) / len(evaluations), 6.0),
        ("ppo_around", "share", 1 - ppo / ppo_s, 0.12),
        ("run_around", "share", 1 - all_work / report["wall_s"], 0.12),
    ]


def print_rows(said: Sequence[str], *, wall_s: float, again_s: float) -> None:
    """Print the rows of a run that made all of its stages, from what it said and stored."""
    stored = next(found[1] for line in said if (found := re.search(r"stored as (run/\S+@\d+)", line)))
    ends = [line for line in said if "▸ done" in line]
    number = next(place for place, line in enumerate(ends) if "made policy/" in line)
    ppo_s = (_clock(ends[number]) - _clock(ends[number - 1])) % DAY_S
    store = open_default_store()
    report = store.read_json(store.resolve(stored), REPORT)
    for name, unit, value, most in rows(report, wall_s=wall_s, again_s=again_s, ppo_s=ppo_s):
        row = Row(name, unit, Goal("value", "<=", most), lambda _, value=value: Found(value))
        sys.stdout.write(json.dumps(line_of(row, Run(tiny=False, rounds=1))) + "\n")


def _clock(line: str) -> int:
    hours, minutes, seconds = map(int, line.split(maxsplit=1)[0].split(":"))
    return 3600 * hours + 60 * minutes + seconds


def main() -> int:
    """Run the quickstart, watch it, print the lines."""
    rlhf = Path(sys.executable).with_name("rlhf")
    stack = StackState.load(settings().home)
    peak: dict[str, int] = {}
    ended = threading.Event()
    started = time.monotonic()
    run = subprocess.Popen([rlhf, "run", "quickstart", *sys.argv[1:]], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    watcher = threading.Thread(target=watch, args=(stack.id, psutil.Process(run.pid), peak, ended))
    watcher.start()
    actors_s: int | None = None
    said = []
    for text in run.stdout:
        sys.stderr.write(text)
        said.append(text)
        if found := re.search(r"makers? ready in (\d+) s", text):
            actors_s = int(found[1])
    status = run.wait()
    wall = time.monotonic() - started
    ended.set()
    watcher.join()
    limits = {
        "wall": wall <= LIMIT_S,
        "memory": sum(peak.values()) <= LIMIT_BYTES,
        "actors": actors_s is None or actors_s <= LIMIT_ACTORS_S,
    }
    line = {
        "bench": "quickstart",
        "status": status,
        "wall_s": round(wall, 1),
        "of_limit": round(wall / LIMIT_S, 3),
        "peak_pss_gb": round(sum(peak.values()) / 1e9, 2),
        "memory_of_limit": round(sum(peak.values()) / LIMIT_BYTES, 3),
        "actors_s": actors_s,
        "missed": [name for name, is_met in limits.items() if not is_met],
        "peak_by_process_mb": {
            name: round(size / 1e6) for name, size in sorted(peak.items(), key=lambda item: -item[1])
        },
    }
    sys.stdout.write(json.dumps(line) + "\n")
    if not status and actors_s is not None:
        again = seconds_of(
            lambda: subprocess.run([rlhf, "run", "quickstart", *sys.argv[1:]], check=True, stdout=sys.stderr)
        )
        print_rows(said, wall_s=wall, again_s=again)
    return status or int(bool(line["missed"]))


if __name__ == "__main__":
    sys.exit(main())

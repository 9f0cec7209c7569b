"""Time and memory of `rlhf run quickstart` on a stack that is up, against the promised limits; one JSON line.

    rlhf up && python bench/quickstart.py

Memory is the sum of proportional set sizes over every process of the stack and the run, sampled each second. The exit
status is the run's; 1 if a limit is missed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

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


def main() -> int:
    """Run the quickstart, watch it, print the line."""
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
    for text in run.stdout:
        sys.stderr.write(text)
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
    return status or int(bool(line["missed"]))


if __name__ == "__main__":
    sys.exit(main())

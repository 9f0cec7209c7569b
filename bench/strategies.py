"""Bytes and step time of each strategy on two ranks, against plain and DDP in the same run; one JSON line.

python bench/strategies.py

A step is forward, backward and Adam on a Llama of 20 million parameters, 4 x 128 tokens a rank, one thread each, over
gloo. The strategies take turns, another one first in each round; a ratio is that of two medians, and stands beside the
ratios of the rounds. Bytes are those of all tensors that a rank holds.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RANKS, DEADLINE_S = 2, 1200
SLOWEST_ZERO2 = 1.10
"""What ZeRO-2 may take of DDP's time."""


def run_ranks(directory: Path) -> dict[str, Any]:
    """Start the ranks, wait for them, and return what the first one found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    result = directory / "result.json"
    started = []
    for rank in range(RANKS):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        command = [sys.executable, "-m", "bench.strategy_runs.rank", str(result)]
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=sys.stderr))
    try:
        codes = [process.wait(timeout=DEADLINE_S) for process in started]
    finally:
        for process in started:
            process.kill()
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}; what they said is above")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def table(measured: dict[str, Any]) -> dict[str, Any]:
    """Return, of each strategy: megabytes by kind, the formula's, seconds, and ratios to plain and to DDP."""
    rows = {}
    for strategy, one in measured.items():
        rows[strategy] = {
            "megabytes": {kind: round(size / 1e6, 1) for kind, size in one["bytes"].items()},
            "formula_megabytes": {
                kind: round(size / 1e6, 1) for kind, size in one["formula"].items() if kind != "offloaded"
            },
            "seconds": round(statistics.median(one["seconds"]), 3),
            "seconds_all": [round(value, 3) for value in one["seconds"]],
        }
        for peer in ("plain", "ddp"):
            others = measured[peer]["seconds"]
            ratios = sorted(mine / theirs for mine, theirs in zip(one["seconds"], others, strict=True))
            rows[strategy][f"times_{peer}"] = round(statistics.median(one["seconds"]) / statistics.median(others), 3)
            rows[strategy][f"times_{peer}_by_round"] = [round(ratio, 3) for ratio in (ratios[0], ratios[-1])]
    return rows


def main() -> None:
    """Measure, and print the line."""
    with tempfile.TemporaryDirectory() as directory:
        result = run_ranks(Path(directory))
    tables = {precision: table(measured) for precision, measured in result["found"].items()}
    zero2 = {precision: rows["zero2"]["times_ddp"] for precision, rows in tables.items()}
    line = {
        "benchmark": "strategies",
        "ranks": RANKS,
        "parameters": result["parameters"],
        "zero2_times_ddp": zero2,
        "at_most": SLOWEST_ZERO2,
        **tables,
    }
    print(json.dumps(line))  # noqa: T201 - the result


if __name__ == "__main__":
    main()

"""Memory beside a trainer that is five times slower than its makers: one JSON line.

    python bench/backpressure.py [--picture docs/pictures/backpressure.png] [--episodes 16]

Real actors of the `ppo` flow on a leased cluster, one trainer and two makers that may be far ahead of it
(`stale_samples: drop`, room for twelve batches). The model is tiny, but each sample carries a megabyte of text, so that
what piles up would be seen. Twice a second it is noted: samples made and not learnt, bytes used in Ray's object
store, resident memory of each process. The line has the means over the second and the third quarter of the run: the
first fills the buffer, and in the last makers have little left to begin.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("RAY_worker_niceness", "0")
import psutil
import ray
from ray._private.internal_api import node_stats

from tasks.pictures.style import COLOURS, INK, SMALL, dress, new_figure, png
from tests.integration.rollout_runs import WAIT_S, RolloutRun, cluster, config, rollout_run

CHUNK_S, STEP_S = 0.3, 0.5
"""Four chunks by two makers in 0.6 seconds, six steps in three: five times as long."""
BUFFER_LIMIT, EVERY_S = 12, 0.5
SAMPLE_BYTES = 1_000_000
MB = 1e6


@ray.remote(num_cpus=0)
class StoreGauge:
    """Reads how full Ray's object store is, from within the cluster."""

    def used_mb(self) -> float:
        """Return it."""
        (node,) = ray.nodes()
        stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
        return float(stats.store_stats.object_store_bytes_used) / MB


class Watch:
    """Looks at a run's memory from a thread.

    Args:
        run: that is up.
    """

    def __init__(self, run: RolloutRun) -> None:
        pids = {name: ray.get(actor.ping.remote(), timeout=WAIT_S) for name, actor in run.makers.items()}
        pids["trainer"] = ray.get(run.trainer.ping.remote(), timeout=WAIT_S)
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        gauge: Any = StoreGauge  # decorated, it has .remote, which its type does not show
        self._trainer, self._gauge = run.trainer, gauge.remote()
        ray.get(self._gauge.used_mb.remote(), timeout=WAIT_S)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.rows: list[dict[str, float]] = []

    def __enter__(self) -> Watch:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        """End."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        begun = time.monotonic()
        while not self._over.wait(EVERY_S):
            used_mb = ray.get(self._gauge.used_mb.remote(), timeout=WAIT_S)
            row = {"at": time.monotonic() - begun, "object store": used_mb}
            row |= {name: process.memory_info().rss / MB for name, process in self._processes.items()}
            row["samples ahead"] = float(ray.get(self._trainer.queue_depth.remote(), timeout=WAIT_S))
            self.rows.append(row)


def quarters(rows: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Return the mean of each figure over the second and the third quarter."""
    quarter = max(1, len(rows) // 4)
    parts = rows[quarter : 2 * quarter], rows[2 * quarter : 3 * quarter]
    return {name: [round(fmean(row[name] for row in part), 1) for part in parts] for name in rows[0] if name != "at"}


def draw(rows: Sequence[dict[str, float]]) -> bytes:
    """Return the picture of all figures over time."""
    figure = new_figure(4.4)
    upper, lower = figure.subplots(2, 1, sharex=True)
    at = [row["at"] for row in rows]
    names = [name for name in rows[0] if name not in ("at", "samples ahead")]
    for name, colour in zip(names, COLOURS, strict=False):
        upper.plot(at, [row[name] for row in rows], color=colour, label=name, linewidth=1.4)
    dress(upper, title="Memory beside a trainer that is five times slower than its makers", x="", y="MB")
    upper.set_ylim(bottom=0)
    upper.legend(fontsize=SMALL, frameon=False, labelcolor=INK, ncols=len(names), loc="center right")
    lower.plot(at, [row["samples ahead"] for row in rows], color=COLOURS[3], linewidth=1.4, drawstyle="steps-post")
    lower.axhline(BUFFER_LIMIT * 8 + 16, color=INK, linewidth=0.8, linestyle=":")
    dress(
        lower, title="Samples made and not learnt; dotted: the limit and the episode that is learnt", x="seconds", y=""
    )
    lower.set_ylim(bottom=0)
    return png(figure)


def main() -> None:
    """Play the run, and say what its memory did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=Path, help="where the picture goes")
    parser.add_argument("--episodes", type=int, default=16)
    asked = parser.parse_args()
    settings = config(
        episodes=asked.episodes, max_staleness=1, stale_samples="drop", buffer_limit=BUFFER_LIMIT,
        cluster={"num_makers": 2},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder) / "cluster"):
        with rollout_run(
            settings, Path(folder) / "run", chunk_s=CHUNK_S, step_s=STEP_S, sample_bytes=SAMPLE_BYTES
        ) as run:
            run.run([0, 1])  # from here on, everything has been loaded
            with Watch(run) as watch:
                records = run.run(range(2, asked.episodes))
        if asked.picture is not None:
            asked.picture.write_bytes(draw(watch.rows))
    counts = {name.removeprefix("chunks_"): value for name, value in records[-1].rollouts.items() if "chunks_" in name}
    line = {"bench": "backpressure", "quarters_mb": quarters(watch.rows), "counts": counts}
    print(json.dumps(line))  # noqa: T201 - the benchmark's line


if __name__ == "__main__":
    main()

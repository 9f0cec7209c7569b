"""What more makers cost and bring, up to 256: the real ledger of leases, under a clock of its own.

The simulation has the phases of real runs with one maker and two: a chunk, what lies between two chunks, and what lies
between two episodes. Real runs with more makers, whose chunks and steps sleep, say how right it is.
"""

from __future__ import annotations

import heapq
import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from bench.speed.growth import slope_of
from bench.speed.measure import Found, Run
from rlhf_core.rollout.lease_queue import LeaseQueue

UNITS_EACH = 4
"""Chunks of an episode for each maker."""
REAL = (1, 2, 4, 8)
"""Makers of the runs that the simulation is held against."""
EPISODES, CHUNKS_OF_EPISODE = 4, 16
CHUNK_S, STEP_S = 0.5, 0.25
MANY = (16, 32, 64, 128, 256)


class Chunk(NamedTuple):
    """A unit of the ledger."""

    episode: int
    index: int
    rows: int = 1


class Phases(NamedTuple):
    """What a run spends its time on, in seconds."""

    chunk: float
    between_chunks: float
    """From the end of a maker's chunk to the begin of its next."""
    around: float
    """Of an episode beside chunks, with one maker: steps, publication, what is counted."""
    each: float
    """What a further maker adds to that."""


def simulated(phases: Phases, *, makers: int, chunks: int, episodes: int = 3) -> float:
    """Return the seconds of an episode in lockstep, by the clock of the simulation."""
    queue: LeaseQueue[Chunk, None] = LeaseQueue(_units(chunks), episodes=episodes)
    now = 0.0
    for episode in range(episodes):
        free = [(now, f"maker-{number}") for number in range(makers)]
        heapq.heapify(free)
        done = now
        while free:
            at, maker = heapq.heappop(free)
            if (lease := queue.lease(maker)) is None:
                continue
            ends = at + phases.chunk
            queue.made(lease, None, version=episode)
            done = max(done, ends)
            heapq.heappush(free, (ends + phases.between_chunks, maker))
        queue.collect(episode, version=episode, timeout_s=1.0, on_progress=lambda _done, _all: None)
        queue.learnt(episode)
        now = done + phases.around + phases.each * (makers - 1)
    return now / episodes


def ledger(run: Run) -> Found:
    """Measure the time that the ledger itself takes for an episode, against the number of makers."""
    costs: dict[float, float] = {}
    for makers in (2, 4) if run.tiny else (1, 4, *MANY):
        costs[makers] = min(_ledger_seconds(makers) for _ in range(run.rounds))
    return slope_of(costs)


def _ledger_seconds(makers: int) -> float:
    """Return the processor's seconds for an episode of which every chunk is made at once, while the trainer waits."""
    chunks = UNITS_EACH * makers
    queue: LeaseQueue[Chunk, None] = LeaseQueue(_units(chunks), episodes=1)
    names = [f"maker-{number}" for number in range(makers)]
    began = time.process_time()
    with ThreadPoolExecutor(1) as trainer:
        collected = trainer.submit(queue.collect, 0, version=0, timeout_s=60.0, on_progress=lambda _done, _all: None)
        for _ in range(UNITS_EACH):
            leases = [queue.lease(name) for name in names]
            for lease in leases:
                assert lease is not None
                queue.made(lease, None, version=0)
        collected.result()
    queue.learnt(0)
    return time.process_time() - began


def simulator(run: Run) -> Found:
    """Measure by how much the simulation is off, at most, beside real runs with up to eight makers."""
    real, phases = _measured(run)
    told: dict[str, Any] = {"limit": "none: it is an error"}
    worst = 0.0
    for number, seconds in real.items():
        expected = simulated(phases, makers=number, chunks=_chunks(run))
        told[f"{number} makers"] = f"{seconds:.2f} s, simulated {expected:.2f}"
        worst = max(worst, abs(expected / seconds - 1))
    return Found(worst, settings=told | {name: round(value, 4) for name, value in phases._asdict().items()})


def episode(run: Run) -> Found:
    """Measure the simulated episode against the number of makers, each of which makes equally many chunks of it."""
    _, phases = _measured(run)
    found = slope_of(
        {makers: simulated(phases, makers=makers, chunks=UNITS_EACH * makers) for makers in (*REAL, *MANY)}
    )
    return replace(found, limit=0.0, settings={**found.settings, "limit": "as with one maker"})


@cache
def _measured(run: Run) -> tuple[dict[int, float], Phases]:
    """Return the mean seconds of warm episodes of real runs by number of makers, and the phases of the first two."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    from tests.integration import rollout_runs  # noqa: PLC0415 - other rows are measured without Ray, too

    makers = REAL[:2] if run.tiny else REAL
    real, around = {}, []
    with (
        TemporaryDirectory(prefix="rlhf-bench-") as place,
        rollout_runs.cluster(Path(place) / "cluster", cpus=max(makers) + 2),
    ):
        for number in makers:
            folder = Path(place) / str(number)
            real[number] = _seconds(rollout_runs, folder, number, run)
            if number == 1:
                chunk, between = _phases(folder.glob(f"{rollout_runs.CHUNKS}-*"))
            around.append(real[number] - -(-_chunks(run) // number) * (chunk + between) + between)
    return real, Phases(chunk, between, around[0], max(0.0, around[1] - around[0]))


def _chunks(run: Run) -> int:
    return 4 if run.tiny else CHUNKS_OF_EPISODE


def _seconds(rollout_runs: Any, folder: Path, makers: int, run: Run) -> float:
    """Return the mean seconds of warm episodes of a real run."""
    chunk_s, step_s = (0.1, 0.05) if run.tiny else (CHUNK_S, STEP_S)
    prompts = 4 * _chunks(run)
    settings = rollout_runs.config(
        episodes=EPISODES, prompts_per_episode=prompts, train_batch_size=prompts, max_epochs=1,
        cluster={"num_makers": makers},
    )  # fmt: skip
    ends = []
    with rollout_runs.rollout_run(settings, folder, chunk_s=chunk_s, step_s=step_s) as actors:
        for number in range(EPISODES):
            actors.run([number])
            ends.append(time.monotonic())
    return (ends[-1] - ends[0]) / (EPISODES - 1)


def _phases(files: Iterable[Path]) -> tuple[float, float]:
    """Return the mean seconds of a chunk, and from its end to the begin of the same maker's next in the episode."""
    made = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    gaps = [
        after["from"] - chunk["to"]
        for each in made
        for chunk, after in pairwise(each)
        if after["episode"] == chunk["episode"]
    ]
    return fmean(chunk["to"] - chunk["from"] for each in made for chunk in each), fmean(gaps)


def _units(chunks: int) -> Any:
    return lambda episode: [Chunk(episode, index) for index in range(chunks)]

"""Does PPO learn as well where its verifier fails? One JSON line a run, then one line a way to fail.

    python bench/abstaining.py [UPDATES [PROCESSES]]

The problem of bench/learning_curve.py. Three seeds each: undisturbed; 30 % of all calls fail; 30 % of those for right
answers alone; these again counted as wrong, as release 0.3 did. Peer: the undisturbed runs. Limit: the mean level of
the last sixth of the updates lies in the 95 % interval (Student's) of theirs.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from math import isnan, nan
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from rlhf_core.rewards.abstaining import RAISED, failure
from rlhf_core.rewards.scoring import VERIFIER, ScoringBatch, Weighted, WeightedScorer
from rlhf_core.rewards.sources import Judged

HERE = Path(__file__).resolve().parent / "reversal"
sys.path.insert(0, str(HERE))
import our_side  # noqa: E402
import problem  # noqa: E402
import settings  # noqa: E402

SHARE, LAST, UNDISTURBED, BEGIN = 0.3, 6, "undisturbed", problem.DIGITS + 1
SEEDS = range(3)
STUDENT = 4.303  # the 97.5 % point with two degrees of freedom: of three undisturbed runs


class Failing:
    """The verifier, in this process, which fails at some answers: by their tokens, so at the same ones in every run.

    Args:
        at: whether it fails at a right answer, and at a wrong one.
        says: what it says then; None for nothing.
    """

    def __init__(self, at: tuple[bool, bool], says: float | None) -> None:
        self._at_right, self._at_wrong, self._says = *at, says

    def __call__(self, batch: ScoringBatch) -> Judged:
        """Return 1 for the digits backwards, else 0; NaN where it fails."""
        found, failures = [], []
        for row, length in zip(batch.sequences.tolist(), batch.action_mask.sum(1).tolist(), strict=True):
            score = problem.score(row[:BEGIN], row[BEGIN : BEGIN + length])
            fails = (self._at_right if score else self._at_wrong) and random.Random(str(row)).random() < SHARE
            said = score if not fails else nan if self._says is None else self._says
            found.append(said)
            failures.append({VERIFIER: failure(RAISED, "it does not answer")} if isnan(said) else {})
        said_all = torch.tensor(found)
        return Judged(said_all, {VERIFIER: said_all}, failures=failures)


WAYS = {
    UNDISTURBED: Failing((False, False), None),
    "at random": Failing((True, True), None),
    "right answers": Failing((True, False), None),
    "right answers count as wrong": Failing((True, False), 0.0),
}


def summary(way: str, levels: dict[str, dict[int, float]]) -> dict[str, Any]:
    """Return a way's levels beside the undisturbed ones: their interval, and the gain by seed, from equal starts."""
    own, peers = ([levels[each][seed] for seed in SEEDS] for each in (way, UNDISTURBED))
    half = STUDENT * stdev(peers) / len(peers) ** 0.5
    low, high = fmean(peers) - half, fmean(peers) + half
    return {
        "bench": "abstaining", "calls_fail": way, "level": round(fmean(own), 3), "by_seed": [round(x, 3) for x in own],
        "peer": round(fmean(peers), 3), "limit": [round(low, 3), round(high, 3)], "within": low <= fmean(own) <= high,
        "gain_by_seed": [round(mine - peer, 3) for mine, peer in zip(own, peers, strict=True)],
    }  # fmt: skip


def run(job: tuple[int, str, int, str]) -> dict[str, Any]:
    """Train once from a stored start; return the line."""
    seed, way, settings.UPDATES, start = job
    found = our_side.train(start, seed, WeightedScorer([Weighted(VERIFIER, 1.0, WAYS[way])]))
    curve, part = found["curve"], max(1, settings.UPDATES // 12)
    return {
        "calls_fail": way, "seed": seed, "level": fmean(curve[-max(1, len(curve) // LAST) :]),
        "held_out": round(found["held_out"], 3), "seconds": found["seconds"],
        "curve": [round(fmean(curve[at : at + part]), 3) for at in range(0, len(curve), part)],
    }  # fmt: skip


def main(updates: int = settings.UPDATES, processes: int = 1) -> int:
    """Run all, and print the lines."""
    levels: dict[str, dict[int, float]] = {way: {} for way in WAYS}
    with tempfile.TemporaryDirectory() as directory, ProcessPoolExecutor(processes) as pool:
        starts = [str(Path(directory) / str(seed)) for seed in SEEDS]
        list(pool.map(problem.start, SEEDS, map(Path, starts)))
        jobs = [pool.submit(run, (seed, way, updates, starts[seed])) for way in WAYS for seed in SEEDS]
        for job in as_completed(jobs):
            line = job.result()
            levels[line["calls_fail"]][line["seed"]] = line["level"]
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    for way in WAYS:
        sys.stdout.write(json.dumps(summary(way, levels)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))

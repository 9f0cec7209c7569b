"""How much of the best episode is kept where a weak reward model alone pays? One JSON line a seed.

    rlhf up && python bench/best_episode.py [--seeds 101 202 303] [--every 1] [--development 200]
    python bench/best_episode.py --simulated

Each seed: the preset `evidence` (`rlhf run evidence`), in which the verifier pays nothing and the reward model, learnt
from few pairs, pays all. `kept` is the stored policy's share of right answers on the evaluation's problems, which no
choice has seen. `best` is the highest share that the development split showed; its luck is in it, so `part`, kept by
best, errs on the low side. `last` is what the development split showed of the last episode.

`--simulated` needs no stack: shares that rise from 0.47 to a peak and fall to 0.30, as the control's did in
docs/evidence.md, are measured with so many problems, and `rlhf_core.ppo.best` chooses. `part` is the chosen episode's
true share by the best one's: its mean, and what 95 of 100 runs reach.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.comparison.runs import run_pipeline
from infra.artifacts import ArtifactStore, open_default_store
from rlhf_core.ppo.best import DEVELOPMENT, best_episode

SEEDS = (101, 202, 303)
EPISODES, START, END = 16, 0.47, 0.30
PEAKS = (0.5, 0.6, 0.8)
PROBLEMS = (50, 100, 200)
RUNS = 10_000


def measure(store: ArtifactStore, given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Run one seed, and return its line."""
    overrides = {
        "ppo.reward": {"verifier": 0.0, "reward_model": 1.0},
        "ppo.evaluate_every": given.every,
        "data.splits": {"sft": 1280, "ppo": 1024, "evaluation": 500, "development": given.development},
        **given.overrides,
    }
    run = run_pipeline(store, given.preset, name=f"best-{seed}", seed=seed, overrides=overrides)
    shown = [row[DEVELOPMENT] for row in run.episodes if DEVELOPMENT in row]
    kept = run.evaluations["ppo"]["metrics"]["accuracy"]
    return {
        "seed": seed,
        "kept_episode": run.stages["ppo"]["metrics"]["kept_episode"],
        "kept": kept,
        "best": max(shown),
        "part": round(kept / max(shown), 4) if max(shown) else None,
        "limit": 0.9,
        "last": shown[-1],
        "development": shown,
        "sft": run.evaluations["sft"]["metrics"]["accuracy"],
    }


def simulate(peak: float, problems: int, seed: int) -> dict[str, Any]:
    """Return what the choice keeps of runs whose true shares are known."""
    random, parts, last = np.random.default_rng(seed), [], []
    for _ in range(RUNS):
        top = random.integers(1, EPISODES - 1)
        true = np.interp(np.arange(EPISODES), [0, top, EPISODES - 1], [START, peak, END])
        chosen = best_episode([{DEVELOPMENT: right / problems} for right in random.binomial(problems, true)])
        parts.append(true[chosen] / true.max())
        last.append(true[-1] / true.max())
    return {
        "peak": peak,
        "problems": problems,
        "part": round(float(np.mean(parts)), 4),
        "95 of 100": round(float(np.quantile(parts, 0.05)), 4),
        "limit": 0.9,
        "last": round(float(np.mean(last)), 4),
    }


def main() -> None:
    """Print a line for each seed, or for each simulated case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="evidence")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--development", type=int, default=200)
    parser.add_argument("--overrides", type=json.loads, default={}, help="configuration by dotted key, as JSON")
    parser.add_argument("--simulated", action="store_true")
    given = parser.parse_args()
    if given.simulated:
        lines = (simulate(peak, problems, seed=0) for peak in PEAKS for problems in PROBLEMS)
    else:
        store = open_default_store()
        lines = (measure(store, given, seed) for seed in given.seeds)
    for line in lines:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

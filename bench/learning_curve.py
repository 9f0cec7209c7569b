"""Does PPO learn as TRL's does? Both on the same problem, starts and settings, three seeds; one JSON line.

    pip install --no-deps --target SOMEWHERE trl==1.12.0      # the last release with PPO; kept out of the lock
    TRL_PATH=SOMEWHERE python bench/learning_curve.py

Without TRL_PATH it measures our side alone and says so. Equal on both sides: the model at the start, prompts, samples,
optimizer, rates, minibatches, epochs, clips, KL, discounts (bench/reversal/settings.py). Not equal: TRL whitens
advantages over the update, we over each minibatch; the noise of sampling.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

HERE = Path(__file__).resolve().parent / "reversal"
sys.path.insert(0, str(HERE))
import problem  # noqa: E402
import settings  # noqa: E402

LAST = 20  # updates at the end of the curve that count as its level
TIMEOUT_S = 1800


def run(side: str, start: Path, seed: int, path: str) -> dict[str, Any]:
    """Train one side from one start in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": path, "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / f"{side}_side.py"), str(start), str(seed)],
        env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{side}'s side ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the level at the end, the held-out score, and a curve of means over ten updates."""
    levels = [fmean(result["curve"][-LAST:]) for result in runs]
    tens = range(0, settings.UPDATES, 10)
    return {
        "reward_by_seed": [round(level, 3) for level in levels],
        "reward": round(fmean(levels), 3),
        "standard_error": round(stdev(levels) / len(levels) ** 0.5, 3),
        "held_out_by_seed": [round(result["held_out"], 3) for result in runs],
        "curve": [round(fmean(fmean(r["curve"][at : at + 10]) for r in runs), 3) for at in tens],
        "seconds": round(fmean(result["seconds"] for result in runs), 1),
    }


def main() -> int:
    """Run every seed on both sides and print the line."""
    trl = os.environ.get("TRL_PATH")
    sides = {"our": ""} | ({"trl": trl} if trl else {})
    if not trl:
        sys.stderr.write("TRL_PATH is not set: our side alone is measured\n")
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    before = []
    with tempfile.TemporaryDirectory() as directory:
        for seed in settings.SEEDS:
            start = Path(directory) / str(seed)
            problem.start(seed, start)
            before.append(problem.held_out(start))
            for side, path in sides.items():
                runs[side].append(run(side, start, seed, path))
    line: dict[str, Any] = {"bench": "learning_curve", "samples": settings.UPDATES * settings.SAMPLES}
    line["held_out_before"] = [round(score, 3) for score in before]
    line |= {side: summary(results) for side, results in runs.items()}
    if trl:
        line["reward_difference"] = round(line["our"]["reward"] - line["trl"]["reward"], 3)
    sys.stdout.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

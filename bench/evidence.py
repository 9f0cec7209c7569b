"""Does PPO add to SFT? The preset `evidence` for seeds chosen before, with more SFT as the control; a JSON line a seed.

    rlhf up && python bench/evidence.py --out evidence.md [--legacy]

Each seed: the whole pipeline (`rlhf run evidence`); then, from the same SFT model, more SFT on PPO's own problems for
as long as PPO took (bench/comparison/control.py), with demonstrations by those who wrote the first ones; for the first
seed once more with the right answers, which a team that has them would rather learn from. All policies answer the same
held-out problems, greedily, and are compared in pairs.
`--legacy` runs the first seed once more with upstream's arithmetic (ppo.legacy). Tables and curves go to --out after
every seed, the episodes as JSON lines beside it. What a finished stage left in the store is not made again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.comparison import control, tables
from bench.comparison.careless import TASK, careless_response
from bench.comparison.runs import Run, outcomes_of, run_pipeline
from flows.presets import resolve
from infra.artifacts import ArtifactStore, open_default_store
from rlhf_core.data.problems import Problem

SEEDS = (101, 202, 303)
LEGACY = {"ppo.legacy": True, "ppo.critic_init": "policy"}  # by upstream's rules no critic can begin as a reward model
CONTROLS: dict[str, Callable[[Problem], str] | None] = {
    "more SFT, careless as before": careless_response,
    "SFT on right answers": None,
}
Curves = dict[str, list[Mapping[str, Any]]]


def arguments() -> argparse.Namespace:
    """Return the command line's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="evidence")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--overrides", type=json.loads, default={}, help="configuration by dotted key, as JSON")
    parser.add_argument("--legacy", action="store_true", help="also the first seed with upstream's arithmetic")
    parser.add_argument("--no-control", action="store_true", help="without more SFT")
    parser.add_argument("--out", type=Path, default=Path("evidence.md"))
    given = parser.parse_args()
    task = resolve(given.preset, overrides=given.overrides).data.task
    if task != TASK and not given.no_control:
        parser.error(
            f"the control's demonstrations are of the task {TASK}, but that of preset {given.preset} is {task}; "
            "take --no-control"
        )
    return given


def measure(store: ArtifactStore, given: argparse.Namespace, seed: int, curves: Curves) -> dict[str, Any]:
    """Run one seed; return its line, and add its episodes to the curves."""
    run = run_pipeline(store, given.preset, name=f"{given.preset}-{seed}", seed=seed, overrides=given.overrides)
    curves[f"seed {seed}"] = list(run.episodes)
    start, after = outcomes_of(store, run, "sft"), outcomes_of(store, run, "ppo")
    policies = {
        "SFT": tables.entry(start, seconds=run.stages["sft"]["seconds"], **_constant(run, "sft")),
        "PPO": tables.entry(after, start, seconds=run.stages["ppo"]["seconds"], **_constant(run, "ppo")),
    }
    for title, demonstrate in {} if given.no_control else CONTROLS.items():
        if demonstrate is None and seed != given.seeds[0]:
            continue  # what right answers would teach is a limit, not a rival: once is enough
        more = control.more_sft(store, run, demonstrate)
        facts: dict[str, Any] = {
            "steps": more.steps,
            "demonstrations": more.demonstrations,
            "last_loss": round(more.last_loss, 5),
        }
        facts["ppo_over_it"] = [round(end, 4) for end in tables.gain(more.outcomes, after)]
        policies[title] = tables.entry(more.outcomes, start, seconds=round(more.seconds, 1), **facts)
    if given.legacy and seed == given.seeds[0]:
        overrides = {**given.overrides, **LEGACY}
        old = run_pipeline(store, given.preset, name=f"{given.preset}-{seed}-legacy", seed=seed, overrides=overrides)
        curves[f"seed {seed}, legacy"] = list(old.episodes)
        policies["PPO, legacy"] = tables.entry(
            outcomes_of(store, old, "ppo"), start, seconds=old.stages["ppo"]["seconds"]
        )
    return {"bench": "evidence", "seed": seed, "run": run.uri, "problems": len(start), "policies": policies}


def _constant(run: Run, role: str) -> dict[str, Any]:
    """Return what the best constant answer would have got, where the evaluation says so."""
    return {name: value for name, value in run.evaluations[role]["metrics"].items() if name.startswith("constant_")}


def write(out: Path, lines: list[dict[str, Any]], curves: Curves) -> None:
    """Write the tables, and the episodes beside them."""
    out.write_text(tables.document(lines, curves))
    rows = [{"run": title, **row} for title, episodes in curves.items() for row in episodes]
    out.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*lines, *rows]))


def main() -> int:
    """Run every seed; print a line and write the tables after each."""
    given = arguments()
    store = open_default_store()
    lines: list[dict[str, Any]] = []
    curves: Curves = {}
    for seed in given.seeds:
        lines.append(measure(store, given, seed, curves))
        sys.stdout.write(json.dumps(lines[-1]) + "\n")
        sys.stdout.flush()
        write(given.out, lines, curves)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Pipeline runs, started as users start them and read back from the store."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.artifacts import ArtifactStore
from rlhf_core.config import PipelineConfig
from rlhf_core.data.jsonl import from_jsonl
from rlhf_core.evaluation import Outcome, outcomes_from_jsonl
from rlhf_core.ppo.former_names import current_names

REPORT, OUTCOMES, EPISODES = "report.json", "outcomes.jsonl", "metrics.jsonl"


@dataclass(frozen=True)
class Run:
    """One finished run of the flow `pipeline`."""

    uri: str
    config: PipelineConfig
    stages: Mapping[str, Mapping[str, Any]]
    """By stage: `data`, `sft`, `preferences`, `reward-model`, `ppo`; each with uri, seconds and metrics."""
    evaluations: Mapping[str, Mapping[str, Any]]
    """By role: `base`, `sft`, `ppo`."""
    episodes: tuple[Mapping[str, Any], ...]


def run_pipeline(store: ArtifactStore, preset: str, *, name: str, seed: int, overrides: Mapping[str, Any]) -> Run:
    """Run `rlhf run PRESET` under a name of its own, so that no champion of another seed stands in the comparison.

    Args:
        store: where the run leaves its artifacts.
        preset: name of the preset and of its deployment.
        name: of the run's artifacts.
        seed: of everything random.
        overrides: configuration by dotted key.

    Raises:
        SystemExit: if the run fails.
    """
    before = store.latest("run", name)
    given = json.dumps({**overrides, "name": name})
    command = [Path(sys.executable).with_name("rlhf"), "run", preset, "-p", f"seed={seed}", "-p", f"overrides={given}"]
    status = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    after = store.latest("run", name)
    if status or after is None or (before is not None and after.uri == before.uri):
        raise SystemExit(f"the run of {preset} with seed {seed} ended with {status} and left no report; see above")
    facts = store.read_json(after, REPORT)
    return Run(
        uri=after.uri,
        config=PipelineConfig.model_validate(after.config),
        stages={stage["stage"]: stage for stage in facts["stages"]},
        evaluations=facts["evaluations"],
        episodes=tuple(current_names(row) for row in from_jsonl(store.read_bytes(after, EPISODES))),
    )


def outcomes_of(store: ArtifactStore, run: Run, role: str) -> list[Outcome]:
    """Return what a role's policy made of the held-out problems."""
    return outcomes_from_jsonl(store.read_bytes(store.resolve(run.evaluations[role]["uri"]), OUTCOMES))

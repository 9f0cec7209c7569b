"""What a report tells: gathered from the store, plain enough for JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from infra.artifacts import ArtifactRef
from infra.artifacts.lineage import draw
from rlhf_core.ppo.former_names import current_names
from tasks.context import Context, page_of
from tasks.evaluate import OUTCOMES
from tasks.report.samples import changes, chosen_samples
from tasks.results import Decision, StageResult
from tasks.showing import only_shows

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
LINEAGE_WIDTH = 84
"""Characters of a line of code that a run's page in Prefect shows, in a window 1280 pixels wide."""
_TRAINED = ("sft", "reward-model")
Row = dict[str, Any]


@dataclass(frozen=True)
class Facts:
    """One run."""

    name: str
    stages: list[StageResult]
    """In order; the last one is PPO."""
    evaluations: dict[str, StageResult]
    """By role."""
    decision: Decision
    champion: str | None
    """After the decision."""
    wall_s: float
    episodes: list[Row]
    training: dict[str, list[Row]]
    """Rows of the steps of each supervised stage that kept them."""
    samples: list[Row] | None
    """Of PPO's last episode; None, with a warning, if they could not be chosen."""
    changes: Row | None
    """On held-out problems, from PPO's start to its end; None if its start was not evaluated, or with a warning."""
    flow_run: str | None
    page: str | None
    lineage: list[str]
    """What the policy came from, to the beginning: a tree, line by line."""

    @property
    def policy(self) -> StageResult:
        """What PPO made."""
        return self.stages[-1]

    def as_json(self) -> bytes:
        """Return everything as JSON."""
        plain = {
            **vars(self),
            "stages": [stage.model_dump() for stage in self.stages],
            "evaluations": {role: result.model_dump() for role, result in self.evaluations.items()},
            "decision": self.decision.model_dump(),
        }
        return json.dumps(plain, indent=1).encode()


def rows_of(context: Context, result: StageResult, path: str) -> list[Row]:
    """Return the rows of an artifact's file of JSON lines; none if it does not have it, as older ones may not."""
    manifest = context.store.resolve(result.uri)
    if path not in {entry.path for entry in manifest.files}:
        return []
    lines = context.store.read_bytes(manifest, path).split(b"\n")
    return [current_names(json.loads(line)) for line in lines if line.strip()]


def gather(
    context: Context,
    *,
    name: str,
    seed: int,
    stages: list[StageResult],
    evaluations: dict[str, StageResult],
    decision: Decision,
    champion: str | None,
    wall_s: float,
) -> Facts:
    """Return what the store and the run's stages say; what is only for reading may be missing, with a warning."""
    policy = stages[-1]
    came_from = context.store.lineage(ArtifactRef(policy.uri, policy.digest))
    samples = rows_of(context, policy, SAMPLES)
    steps = {stage.stage: rows_of(context, stage, METRICS) for stage in stages if stage.stage in _TRAINED}
    return Facts(
        name=name,
        stages=stages,
        evaluations=evaluations,
        decision=decision,
        champion=champion,
        wall_s=wall_s,
        episodes=rows_of(context, policy, METRICS),
        training={stage: rows for stage, rows in steps.items() if rows},
        samples=only_shows("samples of the last episode")(chosen_samples)(samples, seed),
        changes=changes_between(context, evaluations, seed),
        flow_run=context.flow_run,
        page=page_of(context.settings, context.flow_run),
        lineage=only_shows("what the policy came from")(draw)(came_from, width=LINEAGE_WIDTH) or [],
    )


def levels(evaluations: dict[str, StageResult]) -> dict[str, Row]:
    """Return the metrics of the policies that curves are compared with, by the name that is shown."""
    names = {"sft": "SFT start", "start": "start", "champion": "champion"}
    return {shown: evaluations[role].metrics for role, shown in names.items() if role in evaluations}


def judged_by_model(evaluations: dict[str, StageResult]) -> bool:
    """Whether a reward model scored the answers, and no verifier."""
    return any(result.metrics.get("judge") == "reward_model" for result in evaluations.values())


def changes_between(context: Context, evaluations: dict[str, StageResult], seed: int) -> Row | None:
    """Return how held-out answers changed from PPO's start to its end; None if its start was not evaluated.

    None, too, with a warning, if they cannot be compared: that is only for reading.
    """
    start = next((role for role in ("start", "sft", "base") if role in evaluations), None)
    if start is None or "ppo" not in evaluations:
        return None
    before, after = (rows_of(context, evaluations[role], OUTCOMES) for role in (start, "ppo"))
    compare = only_shows("answers before and after PPO")(changes)
    return compare(before, after, by_model=judged_by_model(evaluations), seed=seed)

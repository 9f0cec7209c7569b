"""What a report tells: gathered from the store, plain enough for JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from infra.artifacts import ArtifactRef, Difference
from infra.artifacts.lineage import draw
from rlhf_core.config import PipelineConfig
from rlhf_core.ppo.former_names import current_names
from tasks.challenger import CHALLENGER, incumbent_of
from tasks.clusters import address_of
from tasks.context import Context, page_of
from tasks.evaluate import OUTCOMES
from tasks.report.ancestry import ancestry
from tasks.report.costs import Machine, costs_of
from tasks.report.findings import NO_CAUSE, Figures, Finding, findings, learnt_little, paid_by_source, refusals
from tasks.report.samples import changes, chosen_samples, counts_of, moved
from tasks.results import Decision, StageResult
from tasks.showing import DEADLINE_S, only_shows

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
OTHER = "other"
"""Role of a policy that a person compares with."""
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
    """What the policy that was decided about came from, to the beginning: a tree, line by line."""
    compares: bool = False
    """Two policies that a person chose, and no night: nothing was decided."""
    moved: Row | None = None
    """What became of held-out answers against the policy that the gate compares with: `against`, its `role`, `counts`
    by kind, and all `rows`; None if there is none, or with a warning."""
    paid: list[Row] = field(default_factory=list)
    """What each source of reward said, and its share of the reward's variance."""
    differs: Row | None = None
    """What is different from the champion's run: `against`, then changes of `config`, `data`, `code` and
    `seconds` of PPO."""
    costs: list[Row] = field(default_factory=list)
    """By stage; see `costs_of`."""
    ancestry: Row | None = None
    """Boxes and arrows of the lineage; see `ancestry`."""
    findings: list[Finding] = field(default_factory=list)
    learnt_little: bool = False

    @property
    def policy(self) -> StageResult:
        """What PPO made."""
        return self.stages[-1]

    @property
    def decided_role(self) -> str:
        """Role of the policy that the decision is about."""
        return decided_role(self.evaluations, self.decision)

    @property
    def verdict(self) -> str:
        """What happened, in one sentence of plain words."""
        decision = self.decision
        if self.compares:
            return f"{decision.policy} against {decision.incumbent}: {self._gain}"
        if decision.promote:
            return f"{decision.policy} was promoted: {self._gain}"
        if self.champion == decision.policy:
            return f"{decision.policy} is the champion already"
        if decision.p_value is None:
            return f"{decision.policy} was not promoted: {decision.reason}"
        if decision.approval is not None and not decision.approval.is_given:
            return f"{decision.policy} was not promoted, as it was {decision.approval.told}; the gain was {self._gain}"
        broken = [each.name for each in decision.conditions if not each.holds]
        shown = decision.level is not None and decision.p_value <= decision.level
        no_gain = "it is not better" if decision.difference <= 0 else "the gain may be chance"
        why = ([] if shown else [no_gain]) + ([f"{', '.join(broken)} broke"] if broken else [])
        return f"{decision.policy} was not promoted, as {' and '.join(why) or 'the gain is too small'}: {self._gain}"

    @property
    def reasons(self) -> list[Finding]:
        """What kept the policy from promotion, and what kept it from learning."""
        unknown = [NO_CAUSE] if self.learnt_little and not self.findings else []
        return [*([] if self.compares else refusals(self.decision)), *self.findings, *unknown]

    @property
    def _gain(self) -> str:
        decision = self.decision
        unit = "standard deviations of the judge's score" if judged_by_model(self.evaluations) else "right answers"
        told = f"{decision.difference:+.3f} [{decision.low:+.3f}, {decision.high:+.3f}] {unit}"
        if decision.p_value is None:
            return f"{told} against {decision.incumbent}"
        of = f" of {decision.problems}" if decision.problems else ""
        return f"{told} against {decision.incumbent}, {decision.wins} answers better and {decision.losses} worse{of}"

    def as_json(self) -> bytes:
        """Return everything as JSON."""
        plain = {
            **vars(self),
            "stages": [stage.model_dump() for stage in self.stages],
            "evaluations": {role: result.model_dump() for role, result in self.evaluations.items()},
            "decision": self.decision.model_dump(),
            "moved": self.moved and {name: each for name, each in self.moved.items() if name != "rows"},
            "findings": [asdict(each) for each in self.findings],
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
    config: PipelineConfig | None = None,
) -> Facts:
    """Return what the store and the run's stages say; what is only for reading may be missing, with a warning.

    Args:
        context: the open context.
        name: of the project.
        seed: of random samples.
        stages: in order; the last one made the policy.
        evaluations: by role; with OTHER, two policies are compared and no night is told of.
        decision: the gate's, or the difference of the two.
        champion: after the decision.
        wall_s: seconds since the run began.
        config: of the night, whose prices count; None tells no cost.
    """
    compares = OTHER in evaluations
    policy, store = stages[-1], context.store
    decided = decision.policy
    came_from = store.lineage(ArtifactRef(decided, store.resolve(decided).digest))
    # an SFT model, which may be compared too, was learnt without episodes
    samples, episodes = (rows_of(context, policy, path) if policy.stage == "ppo" else [] for path in (SAMPLES, METRICS))
    steps = {stage.stage: rows_of(context, stage, METRICS) for stage in stages if stage.stage in _TRAINED}
    figures = Figures(episodes=episodes, samples=samples, **_known(stages, evaluations))
    against = decision.incumbent if compares else decision.champion
    return Facts(
        name=name,
        stages=stages,
        evaluations=evaluations,
        decision=decision,
        champion=champion,
        wall_s=wall_s,
        episodes=episodes,
        training={stage: rows for stage, rows in steps.items() if rows},
        samples=only_shows("samples of the last episode")(chosen_samples)(samples, seed),
        changes=changes_between(context, evaluations, seed),
        flow_run=context.flow_run,
        page=page_of(context.settings, context.flow_run),
        lineage=only_shows("what the policy came from")(draw)(came_from, width=LINEAGE_WIDTH) or [],
        compares=compares,
        moved=_moved(context, evaluations, decision),
        paid=only_shows("rewards by source")(paid_by_source)(episodes) or [],
        differs=_differs(context, against, decided) if against not in {None, decided} else None,
        costs=(_costs(context, config, stages, evaluations, wall_s) or []) if config else [],
        ancestry=only_shows("the picture of what the policy came from")(ancestry)(came_from),
        findings=only_shows("findings")(findings)(figures) or [],
        learnt_little=bool(only_shows("findings")(learnt_little)(figures)),
    )


def _known(stages: Sequence[StageResult], evaluations: Mapping[str, StageResult]) -> dict[str, Row]:
    """Return the figures that findings are made from, as far as the run has them."""
    start, made = start_of(evaluations), {stage.stage: stage.metrics for stage in stages}
    found = {
        "start": evaluations[start].metrics if start else None,
        "end": evaluations["ppo"].metrics if "ppo" in evaluations else None,
        "sft": made.get("sft"),
        "reward_model": made.get("reward-model"),
    }
    return {name: metrics for name, metrics in found.items() if metrics is not None}


def start_of(roles: Iterable[str]) -> str | None:
    """Return the role of the policy that PPO began with; None if it was not evaluated."""
    return next((role for role in ("start", "sft", "base") if role in set(roles)), None)


def decided_role(evaluations: Mapping[str, StageResult], decision: Decision) -> str:
    """Return the role of the policy that a decision is about: the challenger's where the gate chose it, else PPO's."""
    waited = evaluations.get(CHALLENGER)
    return CHALLENGER if waited is not None and waited.metrics.get("policy") == decision.policy else "ppo"


@only_shows("what moved against the champion")
def _moved(context: Context, evaluations: dict[str, StageResult], decision: Decision) -> Row | None:
    role, decided = OTHER if OTHER in evaluations else incumbent_of(evaluations), decided_role(evaluations, decision)
    if role is None or decided not in evaluations:
        return None
    rows = moved_rows(context, evaluations, role, decided)
    counts = counts_of(rows, by_model=judged_by_model(evaluations))
    return {"against": str(evaluations[role].metrics["policy"]), "role": role, "counts": counts, "rows": rows}


def moved_rows(context: Context, evaluations: dict[str, StageResult], before: str, after: str) -> list[Row]:
    """Return what became of each held-out answer from the policy of one role to that of another."""
    old, new = (rows_of(context, evaluations[each], OUTCOMES) for each in (before, after))
    return moved(old, new, by_model=judged_by_model(evaluations))


@only_shows("what differs from the champion's run")
def _differs(context: Context, before: str, after: str) -> Row:
    """Return what is different in configuration, data and code, each change as name, before and after."""
    store = context.store
    found = store.diff(before, after)
    old, new = (
        next((each for each in store.resolve(uri).parents if each.uri.startswith("dataset/")), None)
        for uri in (before, after)
    )
    code = [*([found.source] if found.source else []), *found.packages]
    return {
        "against": before,
        "config": [[each.name, each.before, each.after] for each in found.config if found.tells_of(each)],
        "data": _of_datasets(store.diff(old, new) if old and new else None),
        "code": [[each.name or "source digest", each.before, each.after] for each in code],
        "seconds": [
            [each.name, *(_rounded(value) for value in (each.before, each.after))]
            for each in found.metrics
            if each.name.startswith("seconds")
        ],
    }


def _rounded(seconds: Any) -> Any:
    return round(seconds, 1) if isinstance(seconds, float) else seconds


def _of_datasets(found: Difference | None) -> list[list[Any]]:
    """Return which datasets they are, if they differ, and which of their counts do."""
    if found is None or not any(each.what != "same" for each in found.files):
        return []
    counts = [each for each in found.metrics if type(each.before) is int or type(each.after) is int]
    return [["dataset", found.before, found.after], *([each.name, each.before, each.after] for each in counts)]


@only_shows("what the run cost")
def _costs(
    context: Context,
    config: PipelineConfig,
    stages: list[StageResult],
    evaluations: dict[str, StageResult],
    wall_s: float,
) -> list[Row]:
    from tasks.gpu_allocation import available_gpus

    gpus = only_shows("the number of GPUs", deadline_s=DEADLINE_S)(available_gpus)(address_of(config.ppo.cluster))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    stored = {each.uri: context.store.resolve(each.uri).size for each in (*stages, *evaluations.values())}
    machine = Machine(cores, gpus or 0)
    return costs_of(stages, evaluations, stored=stored, wall_s=wall_s, machine=machine, budget=config.budget)


def levels(evaluations: dict[str, StageResult]) -> dict[str, Row]:
    """Return the metrics of the policies that curves are compared with, by the name that is shown."""
    names = {"sft": "SFT start", "start": "start", "champion": "champion", OTHER: OTHER}
    return {shown: evaluations[role].metrics for role, shown in names.items() if role in evaluations}


def judged_by_model(evaluations: dict[str, StageResult]) -> bool:
    """Whether a reward model scored the answers, and no verifier."""
    return any(result.metrics.get("judge") == "reward_model" for result in evaluations.values())


def changes_between(context: Context, evaluations: dict[str, StageResult], seed: int) -> Row | None:
    """Return how held-out answers changed from PPO's start to its end; None if its start was not evaluated.

    None, too, with a warning, if they cannot be compared: that is only for reading.
    """
    start = start_of(evaluations)
    if start is None or "ppo" not in evaluations:
        return None
    before, after = (rows_of(context, evaluations[role], OUTCOMES) for role in (start, "ppo"))
    compare = only_shows("answers before and after PPO")(changes)
    return compare(before, after, by_model=judged_by_model(evaluations), seed=seed)

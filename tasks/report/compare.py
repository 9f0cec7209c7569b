"""Any two policies as a night's report shows two: what moved, what differs, and what each run learnt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infra.artifacts import ArtifactRef, Manifest
from infra.errors import ReferenceNotFoundError
from rlhf_core.functional.intervals import paired_difference_interval
from rlhf_core.gating.paired_test import sign_test
from tasks.context import Context
from tasks.report.facts import OTHER, Facts, gather, judged_by_model, moved_rows
from tasks.results import SHOWN_CONFIDENCE, Decision, StageResult
from tasks.stages import stage_result

_STAGES = {"dataset": "data", "sft": "sft", "reward-model": "reward-model"}
_FEWEST = 2
"""Problems that both were asked: an interval needs two."""


def facts_between(context: Context, before: str, after: str) -> Facts:
    """Return what is known of two policies, the second against the first; nothing is decided.

    Args:
        context: the open context.
        before: a run's report, or a policy that was evaluated.
        after: the other.

    Raises:
        ReferenceNotFoundError: one of them was not evaluated, they were judged by different judges, or they were
            asked no problems in common.
    """
    old, new = (_policy(context, reference) for reference in (before, after))
    evaluations = _evaluations(context, old, new)
    rows = moved_rows(context, evaluations, OTHER, "ppo")
    if len(rows) < _FEWEST:
        raise ReferenceNotFoundError(
            f"{old.uri} and {new.uri} were judged on {len(rows)} problems in common, and two are needed; evaluate both "
            "on one dataset: prefect deployment run evaluate/PRESET -p actor=POLICY -p data=DATASET"
        )
    return gather(
        context,
        name=new.name,
        seed=0,
        stages=_stages(context, new),
        evaluations=evaluations,
        decision=_difference(rows, old.uri, new.uri, by_model=judged_by_model(evaluations)),
        champion=None,
        wall_s=0.0,
    )


def _policy(context: Context, reference: str) -> Manifest:
    """Return the policy that a reference names, or that the run of it made."""
    manifest = context.store.resolve(reference)
    if manifest.kind != "run":
        return manifest
    made = [parent for parent in manifest.parents if parent.uri.startswith("policy/")]
    if not made:
        raise ReferenceNotFoundError(f"{manifest.uri} made no policy; name a run that did, or a policy")
    return context.store.resolve(made[-1])


def _evaluations(context: Context, old: Manifest, new: Manifest) -> dict[str, StageResult]:
    """Return the newest evaluations of both by the same judge: on the same dataset, if there are such."""
    asked = [_asked(context, policy) for policy in (old, new)]
    judged = [(one, other) for other in asked[1] for one in asked[0] if _judge(one) == _judge(other)]
    if not judged:
        raise ReferenceNotFoundError(
            f"no judge has scored both {old.uri} and {new.uri}, and scores of different judges cannot be compared; "
            "evaluate both with one: prefect deployment run evaluate/PRESET -p actor=POLICY -p reward_model=JUDGE"
        )
    pair = next((each for each in judged if _datasets(each[0]) == _datasets(each[1])), judged[0])
    found = (stage_result("evaluate", each, reused=True) for each in pair)
    policies = (old.uri, new.uri)
    return {
        role: each.model_copy(update={"metrics": {**each.metrics, "policy": policy}})
        for role, each, policy in zip((OTHER, "ppo"), found, policies, strict=True)
    }


def _asked(context: Context, policy: Manifest) -> list[Manifest]:
    """Return the evaluations of a policy, the newest first."""
    found = [
        each for each in context.store.list("evaluation") if each.metrics.get("policy_digest") == policy.digest
        or each.metrics.get("policy") == policy.uri
    ]  # fmt: skip
    if not found:
        raise ReferenceNotFoundError(
            f"{policy.uri} was never evaluated; do so first: "
            f"prefect deployment run evaluate/PRESET -p actor={policy.uri}"
        )
    return sorted(found, key=lambda each: each.created, reverse=True)


def _judge(evaluation: Manifest) -> tuple[Any, set[str]]:
    """Return the judge's name, and the digest of the reward model where it is one."""
    return evaluation.metrics.get("judge"), _digests(evaluation, "reward-model")


def _datasets(evaluation: Manifest) -> set[str]:
    return _digests(evaluation, "dataset")


def _digests(evaluation: Manifest, kind: str) -> set[str]:
    return {parent.digest for parent in evaluation.parents if parent.uri.startswith(f"{kind}/")}


def _stages(context: Context, policy: Manifest) -> list[StageResult]:
    """Return what a policy was made from, as far as the store still has it, and the policy."""
    store = context.store
    parents = {parent.uri.partition("/")[0]: ArtifactRef(parent.uri, parent.digest) for parent in policy.parents}
    found = [
        stage_result(stage, store.resolve(parents[kind]), reused=True)
        for kind, stage in _STAGES.items()
        if kind in parents and store.holds(parents[kind])
    ]
    return [*found, stage_result("sft" if policy.kind == "sft" else "ppo", policy, reused=True)]


def _difference(rows: Sequence[dict[str, Any]], old: str, new: str, *, by_model: bool) -> Decision:
    """Return the paired difference in the form of a decision that promotes nothing."""
    figure = "score" if by_model else "correct"
    before, after = ([float(row[side][figure]) for row in rows] for side in ("before", "after"))
    found = paired_difference_interval(before, after, SHOWN_CONFIDENCE)
    wins = sum(now > then for then, now in zip(before, after, strict=True))
    losses = sum(now < then for then, now in zip(before, after, strict=True))
    return Decision(
        promote=False, reason="", policy=new, incumbent=old, champion=None, difference=found.estimate,
        low=found.low, high=found.high, wins=wins, losses=losses, p_value=sign_test(wins, losses),
    )  # fmt: skip

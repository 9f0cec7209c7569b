"""The gate's side conditions, from what the store holds of both policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from infra.errors import ReferenceNotFoundError
from rlhf_core.config import PipelineConfig
from rlhf_core.gating.conditions import Compared, Condition, Known, side_conditions
from tasks.context import Context, open_context
from tasks.evaluate import MEASURES, OUTCOMES, REWARD_MODEL
from tasks.results import StageResult

if TYPE_CHECKING:
    from infra.artifacts import Manifest
    from rlhf_core.forgetting.measures import Measure


def conditions_of(
    config: PipelineConfig, evaluations: Mapping[str, StageResult], incumbent: StageResult, candidate: StageResult
) -> tuple[Condition, ...]:
    """Return what came of each side condition of promoting a policy.

    Args:
        config: the preset.
        evaluations: by role; `base` is the base model's.
        incumbent: evaluation of who would be replaced.
        candidate: evaluation of who would be promoted.
    """
    context, base = open_context(), evaluations.get("base")
    policy = _manifest_of(context, str(candidate.metrics["policy"]))
    compared = Compared(
        _known(context, incumbent),
        _known(context, candidate),
        base=_measures(context, base) if base else {},
        by_score=candidate.metrics.get("judge") == REWARD_MODEL,
        ppo=policy.metrics if policy else {},
        reward_model=_reward_model(context, config, policy, candidate),
    )
    return side_conditions(compared, config.gate.conditions)


def _known(context: Context, evaluation: StageResult) -> Known:
    from rlhf_core.evaluation import outcomes_from_jsonl

    body = context.store.read_bytes(context.store.resolve(evaluation.uri), OUTCOMES)
    return Known(outcomes_from_jsonl(body), _measures(context, evaluation))


def _measures(context: Context, evaluation: StageResult) -> dict[str, Measure]:
    from rlhf_core.forgetting.measures import measures_from_jsonl

    manifest = context.store.resolve(evaluation.uri)
    if MEASURES not in {file.path for file in manifest.files}:  # of an earlier release
        return {}
    return measures_from_jsonl(context.store.read_bytes(manifest, MEASURES))


def _reward_model(
    context: Context, config: PipelineConfig, policy: Manifest | None, candidate: StageResult
) -> Mapping[str, Any] | None:
    """Return the figures of the reward model that paid the policy, else of the one that judged it; None if none did."""
    paid = policy if config.ppo.reward.reward_model > 0 else None
    judged = context.store.resolve(candidate.uri) if candidate.metrics.get("judge") == REWARD_MODEL else None
    for artifact in (paid, judged):
        for parent in artifact.parents if artifact else ():
            found = _manifest_of(context, parent.uri) if parent.uri.startswith("reward-model/") else None
            if found is not None:
                return found.metrics
    return None


def _manifest_of(context: Context, uri: str) -> Manifest | None:
    """Return an artifact's manifest; None of a model outside the store, or of what was deleted since."""
    try:
        return context.store.resolve(uri)
    except ReferenceNotFoundError:
        return None

"""The gate, and the champion's alias."""

from __future__ import annotations

from rlhf_core.config import PipelineConfig
from tasks.context import open_context
from tasks.evaluate import OUTCOMES
from tasks.progress import say
from tasks.results import Decision, StageResult
from tasks.sentences import stage_task


@stage_task(name="gate")
def gate(config: PipelineConfig, evaluations: dict[str, StageResult]) -> Decision:
    """Return whether the policy replaces the champion, from the stored outcomes of both.

    Args:
        config: the preset; its gate says how sure the gain must be.
        evaluations: by role; `ppo` is the candidate. The incumbent is `champion`, else `sft`, else `base`.
    """
    candidate = evaluations["ppo"]
    role = next(role for role in ("champion", "sft", "base") if role in evaluations)
    incumbent = evaluations[role]
    policy, opponent = str(candidate.metrics["policy"]), str(incumbent.metrics["policy"])
    champion = opponent if role == "champion" else None
    if candidate.metrics["policy_digest"] == incumbent.metrics["policy_digest"]:
        return Decision(
            promote=False,
            reason=f"{policy} is the champion already",
            policy=policy,
            incumbent=opponent,
            champion=champion,
            difference=0.0,
            low=0.0,
            high=0.0,
        )
    before, after = _outcomes(incumbent), _outcomes(candidate)
    from rlhf_core.functional.intervals import paired_difference_interval

    keys = sorted(before)
    interval = paired_difference_interval(
        before=[before[key] for key in keys],
        after=[after[key] for key in keys],
        confidence=config.gate.confidence,
    )
    promote = interval.low > config.gate.min_gain
    figures = f"{interval.estimate:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"
    reason = (
        f"{policy} against {opponent} ({role}): {figures} on the same {len(keys)} problems; the lower end is "
        f"{'above' if promote else 'not above'} {config.gate.min_gain:g}"
    )
    say("gate", f"{'promote' if promote else 'keep the incumbent'}: {reason}")
    return Decision(
        promote=promote,
        reason=reason,
        policy=policy,
        incumbent=opponent,
        champion=champion,
        difference=interval.estimate,
        low=interval.low,
        high=interval.high,
    )


@stage_task(name="promote")
def promote(decision: Decision) -> str | None:
    """Move the alias `champion` if the gate says so; return the champion's reference, or None if there is none.

    Raises:
        StoreError: the champion is no longer the one that the gate compared with; run again to compare anew.
    """
    context = open_context()
    name = context.store.resolve(decision.policy).name
    if decision.promote:
        who = f"run {context.flow_run}" if context.flow_run else "a run without Prefect"
        context.store.set_alias(decision.policy, "champion", why=decision.reason, who=who, expected=decision.champion)
    champion: str | None = context.store.alias("policy", name, "champion")
    return champion


def _outcomes(evaluation: StageResult) -> dict[str, bool]:
    from rlhf_core.evaluation import outcomes_from_jsonl

    store = open_context().store
    body = store.read_bytes(store.resolve(evaluation.uri), OUTCOMES)
    return {outcome.key: outcome.correct for outcome in outcomes_from_jsonl(body)}

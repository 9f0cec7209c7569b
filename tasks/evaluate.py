"""Greedy answers on held-out problems, every outcome kept; comparing policies is arithmetic over them."""

from __future__ import annotations

import time
from typing import Any

from rlhf_core.config import PipelineConfig
from tasks.context import (
    Context,
    commit_stage,
    materialise,
    open_context,
    reuse_or_make,
    source_digest,
    stage_key,
)
from tasks.parents import ancestors, base_model
from tasks.progress import Progress, say
from tasks.results import SHOWN_CONFIDENCE, Parent, StageResult
from tasks.sentences import stage_task

OUTCOMES = "outcomes.jsonl"


@stage_task(name="evaluate-policy", task_run_name="evaluate {policy.uri}")
def evaluate_policy(config: PipelineConfig, policy: Parent, dataset: Parent) -> StageResult:
    """Return the stored evaluation of a policy on the dataset's held-out problems."""
    context = open_context()
    source = source_digest("evaluate")
    facts = config.model_dump(mode="json", include={"template", "evaluation"})
    key = stage_key("evaluate", config=facts, inputs=[policy.digest, dataset.digest], seed=0, source=source)

    def make() -> StageResult:
        return _make(context, config, policy, dataset, key, source)

    return reuse_or_make(context, stage="evaluate", kind="evaluation", name=config.name, key=key, make=make)


def contestants(config: PipelineConfig, policy: str | None) -> dict[str, Parent]:
    """Return who is evaluated, by role: base and sft (if the policy came from them), ppo, champion (if there is one).

    Args:
        config: the preset.
        policy: reference of the new policy; None takes `policy/<name>@latest`.
    """
    context = open_context()
    manifest = context.store.resolve(policy or f"policy/{config.name}@latest")
    found = ancestors(context, manifest.ref.uri)
    base = base_model(context, config)
    roles = {"base": base} if base.digest in found.values() else {}
    for parent in manifest.parents:
        if parent.uri.startswith("sft/"):
            roles["sft"] = Parent(uri=parent.uri, digest=parent.digest)
    roles["ppo"] = Parent(uri=manifest.ref.uri, digest=manifest.digest)
    champion = context.store.alias("policy", manifest.name, "champion")
    if champion is not None:
        crowned = context.store.resolve(champion)
        roles["champion"] = Parent(uri=crowned.ref.uri, digest=crowned.digest)
    return roles


def _make(
    context: Context, config: PipelineConfig, policy: Parent, dataset: Parent, key: str, source: str
) -> StageResult:
    from rlhf_core.data import PromptTemplate, problems_from_jsonl
    from rlhf_core.evaluation import evaluate_policy as evaluate
    from rlhf_core.evaluation import outcomes_to_jsonl
    from rlhf_core.functional.intervals import wilson_interval
    from rlhf_core.models.loading import default_device, load_causal_lm, load_tokenizer

    started = time.perf_counter()
    directory = materialise(context, policy)
    template = PromptTemplate(load_tokenizer(directory), config.template)
    problems = problems_from_jsonl((materialise(context, dataset) / "evaluation.jsonl").read_bytes())
    model = load_causal_lm(directory, "float32", device=default_device())
    progress = Progress("evaluate", len(problems), f"{policy.uri} problem")
    outcomes = evaluate(
        model, template, problems, config.evaluation, on_progress=lambda done, _total: progress.step(done)
    )
    right = sum(outcome.correct for outcome in outcomes)
    interval = wilson_interval(right, len(outcomes), SHOWN_CONFIDENCE)
    metrics: dict[str, Any] = {
        "policy": policy.uri,
        "policy_digest": policy.digest,
        "problems": len(outcomes),
        "accuracy": right / len(outcomes),
        "low": interval.low,
        "high": interval.high,
        "well_formed": sum(outcome.well_formed for outcome in outcomes) / len(outcomes),
        "truncated": sum(outcome.truncated for outcome in outcomes) / len(outcomes),
        "seconds": time.perf_counter() - started,
    }
    say(
        "evaluate",
        f"{policy.uri}: {metrics['accuracy']:.3f} right [{interval.low:.3f}, {interval.high:.3f}] of {len(outcomes)}, "
        f"{metrics['well_formed']:.2f} well formed, {metrics['truncated']:.2f} cut off",
    )
    return commit_stage(
        context,
        stage="evaluate",
        kind="evaluation",
        name=config.name,
        files={OUTCOMES: outcomes_to_jsonl(outcomes)},
        key=key,
        parents=[policy, dataset],
        config=config,
        metrics=metrics,
        source=source,
    )

"""Preference pairs: the dataset's own, or pairs of a policy's samples."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

from rlhf_core.config import PipelineConfig
from rlhf_core.counting import counted
from rlhf_core.errors import DataError
from tasks.context import Context, materialise, open_context
from tasks.models import load_policy
from tasks.parents import base_of
from tasks.progress import Progress, say
from tasks.results import PAIRS, Parent, StageResult
from tasks.source import source_digest
from tasks.stages import commit_stage, once_in_a_run, reuse_or_make, stage_key, stage_result
from tasks.task_errors import stage_task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_core.data import Problem, PromptTemplate
    from rlhf_core.rollout.preferences import SampledPairs


@stage_task(name="collect-preferences")
def collect_preferences(config: PipelineConfig, dataset: Parent, policy: Parent) -> StageResult:
    """Return preference pairs: the dataset's own, or pairs of the policy's samples ordered by the verifier."""
    context = open_context()
    manifest = context.store.resolve(dataset.uri)
    held = {entry.path for entry in manifest.files}
    if PAIRS in held:
        return stage_result("preferences", manifest, reused=True)
    if "preferences.jsonl" not in held:
        raise DataError(
            f"{dataset.uri} holds {', '.join(sorted(held))}, but a reward model needs {PAIRS}, or problems to sample "
            "pairs for in preferences.jsonl"
        )
    from rlhf_core.rewards.verifying import judge_facts

    verifier = judge_facts(config)
    if verifier is None:
        raise DataError(
            f"{dataset.uri} holds no preference pairs, and no verifier is known by which samples could be ordered; "
            "give data.preferences, or problems with answers and data.verifier"
        )
    source = source_digest("preferences", "models")
    facts = {
        "verifier": verifier,
        "template": config.template.model_dump(mode="json"),
        "samples": config.reward_model.samples_per_prompt,
        "max_new_tokens": config.reward_model.max_new_tokens,
        "pairs": config.reward_model.pairs,
        "dtype": config.ppo.rollout_dtype,
        "shares_base": config.reward_model.shares_base,
    }
    inputs = [dataset.digest, policy.digest]
    key = stage_key("preferences", config=facts, inputs=inputs, seed=config.seed, source=source)

    def make() -> StageResult:
        return _sample_pairs(context, config, dataset, policy, key, source)

    found = {"kind": "dataset", "name": f"{config.name}-preferences", "key": key}
    return once_in_a_run(
        context, "preferences", lambda: reuse_or_make(context, stage="preferences", **found, make=make)
    )


def _sample_pairs(
    context: Context, config: PipelineConfig, dataset: Parent, policy: Parent, key: str, source: str
) -> StageResult:
    from rlhf_core.data import PromptTemplate, pairs_to_jsonl, problems_from_jsonl
    from rlhf_core.models.loading import load_tokenizer

    started = time.perf_counter()
    directory = materialise(context, policy)
    template = PromptTemplate(load_tokenizer(directory), config.template)
    problems = problems_from_jsonl((materialise(context, dataset) / "preferences.jsonl").read_bytes())
    made = _sampled(context, config, policy, template, problems)
    metrics: dict[str, Any] = {**made.figures, "seconds": time.perf_counter() - started}
    say("preferences", f"{counted(len(made.pairs), 'pair')} from {counted(len(problems), 'prompt')}")
    return commit_stage(
        context,
        stage="preferences",
        kind="dataset",
        name=f"{config.name}-preferences",
        files={PAIRS: pairs_to_jsonl(made.pairs)},
        key=key,
        parents=[policy, dataset],
        config=config,
        metrics=metrics,
        source=source,
    )


def _sampled(
    context: Context, config: PipelineConfig, policy: Parent, template: PromptTemplate, problems: Sequence[Problem]
) -> SampledPairs:
    """Return pairs of the policy's samples, ordered by the data's verifier."""
    from rlhf_core.models.base import check_bases
    from rlhf_core.rewards.verifying import judge_of
    from rlhf_core.rollout.preferences import sample_pairs

    judge = judge_of(config, template=template, allowed_modules=context.settings.reward_modules)
    assert judge is not None  # `collect_preferences` has checked this
    base = base_of(context, config, policy)
    model = load_policy(context, policy, base, config.ppo.rollout_dtype, shares_base=config.reward_model.shares_base)
    with closing(judge):
        progress = Progress("preferences", len(problems), "prompt")
        made = sample_pairs(
            model,
            template,
            problems,
            config.reward_model,
            seed=config.seed,
            on_progress=progress.step,
            judge=judge,
            max_abstained=config.ppo.max_abstained,
        )
    check_bases(model)
    return made

"""Greedy answers on held-out problems, every outcome kept; comparing policies is arithmetic over them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from infra.artifacts.ref import EXTERNAL_PREFIX, ArtifactRef
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ConfigError
from tasks.challenger import CHALLENGER, incumbent_of, open_challenge
from tasks.context import Context, materialise, open_context
from tasks.models import load_policy, load_reward_model
from tasks.parents import ancestors, base_model, base_of, resolve_reward_model
from tasks.plan import settled_once
from tasks.progress import Progress, say
from tasks.projects import champion_of, expected_champion, latest_reference
from tasks.results import SHOWN_CONFIDENCE, Parent, StageResult
from tasks.scratch import scratch_directory
from tasks.source import source_digest
from tasks.stages import commit_stage, reuse_or_make, stage_key
from tasks.task_errors import stage_task

if TYPE_CHECKING:
    from rlhf_core.data import Problem, PromptTemplate
    from rlhf_core.evaluation import ConstantAnswer, Outcome
    from rlhf_core.forgetting.measures import Measure

OUTCOMES = "outcomes.jsonl"
MEASURES = "measures.jsonl"
"""What was measured beside the task; not there in evaluations of earlier releases."""
REWARD_MODEL = "reward_model"
"""The judge's name in an evaluation's figures, where it is one."""
_START_ROLES = {"sft": "sft", "policy": "start"}
"""By kind of a policy's parent."""


@stage_task(name="evaluate-policy", task_run_name="evaluate {policy.uri}")
def evaluate_policy(
    config: PipelineConfig,
    policy: Parent,
    dataset: Parent,
    reward_model: Parent | None = None,
    beside: Parent | None = None,
) -> StageResult:
    """Return the stored evaluation of a policy on the dataset's held-out problems.

    Args:
        config: the preset.
        policy: who answers.
        dataset: holds the problems.
        reward_model: scores the answers where `evaluation.judge` says so.
        beside: another policy that answers; what its adapters are over is mapped for both.
    """
    from rlhf_core.forgetting.suites import suite_facts
    from rlhf_core.rewards.verifying import judge_facts

    context = open_context()
    source = source_digest("evaluate", "models")
    scorer = reward_model if judged_by_reward_model(config) else None
    facts = config.model_dump(mode="json", include={"template", "evaluation"})
    facts["verifier"] = None if scorer else judge_facts(config)
    facts["suites"] = suite_facts(config.evaluation.forgetting)
    shares_base = _is_base_of(context, config, policy, beside)
    facts["shares_base"] = shares_base  # the last bits differ
    inputs = [policy.digest, dataset.digest, *([scorer.digest] if scorer else [])]
    key = stage_key("evaluate", config=facts, inputs=inputs, seed=0, source=source)

    def make() -> StageResult:
        return _make(context, config, policy, dataset, scorer, (key, source), shares_base=shares_base)

    # not recorded for a restart: the same code finds it by its key, and other code asks all of them again
    found = reuse_or_make(context, stage="evaluate", kind="evaluation", name=config.name, key=key, make=make)
    # the same weights may have been evaluated under another name: what is promoted is the policy that was asked about
    return found.model_copy(update={"metrics": {**found.metrics, "policy": policy.uri}})


@stage_task(name="find-judge")
def find_judge(config: PipelineConfig, reward_model: str | None) -> Parent | None:
    """Return the reward model that scores answers: the one that is named, or the project's latest; None if none does.

    Raises:
        ConfigError: one is needed, and there is none yet.
    """
    return resolve_reward_model(open_context(), config, reward_model) if judged_by_reward_model(config) else None


def judged_by_reward_model(config: PipelineConfig) -> bool:
    """Return whether a reward model scores held-out answers, and not the data's verifier."""
    return config.evaluation.judge == "reward_model"


def contestants(config: PipelineConfig, policy: str | None) -> dict[str, Parent]:
    """Return who is evaluated, by role: base, sft, start, ppo, champion and challenger, as far as there are.

    The base model is among them if the policy came from it. PPO went on from `sft`, or from another policy, `start`.

    Args:
        config: the preset.
        policy: reference of the new policy; None takes the project's latest.
    """
    context = open_context()

    def find() -> dict[str, Parent]:
        roles = _contestants(context, config, policy)
        told = ", ".join(f"{role} {parent.uri}" for role, parent in roles.items())
        say("evaluate", told if "champion" in roles else f"{told}; there is no champion yet")
        if "champion" in roles and not expected_champion(roles["ppo"].uri, roles["champion"].uri):
            say(
                "evaluate",
                f"{roles['champion'].uri} was promoted by an earlier release, for the same task: it stands in",
            )
        return {role: parent.model_copy(update={"path": None}) for role, parent in roles.items()}

    found: dict[str, Parent] = settled_once(context, "contestants", dict[str, Parent], find)
    is_base = {role: parent.uri.startswith(EXTERNAL_PREFIX) for role, parent in found.items()}
    return {role: base_model(context, config) if is_base[role] else parent for role, parent in found.items()}


def _contestants(context: Context, config: PipelineConfig, policy: str | None) -> dict[str, Parent]:
    manifest = context.store.resolve(policy or latest_reference(context, config, "policy"))
    base = base_model(context, config)
    roles = {"base": base} if base.digest in ancestors(context, manifest.ref.uri) else {}
    for parent in manifest.parents:
        role = _START_ROLES.get(parent.uri.partition("/")[0])
        if role is not None:
            roles[role] = Parent(uri=parent.uri, digest=parent.digest)
    roles["ppo"] = Parent(uri=manifest.ref.uri, digest=manifest.digest)
    champion = champion_of(context, config, manifest.name)
    if champion is not None:
        roles["champion"] = Parent(uri=champion.ref.uri, digest=champion.digest)
    incumbent = incumbent_of(roles)
    if incumbent is not None:
        challenge = open_challenge(context, manifest.name, roles[incumbent], roles["ppo"])
        if challenge is not None:
            roles[CHALLENGER] = challenge.policy
    return roles


def _make(
    context: Context,
    config: PipelineConfig,
    policy: Parent,
    dataset: Parent,
    scorer: Parent | None,
    identity: tuple[str, str],
    *,
    shares_base: bool,
) -> StageResult:
    from rlhf_core.data import problems_from_jsonl
    from rlhf_core.evaluation import check_judged, evaluation_metrics, outcomes_to_jsonl
    from rlhf_core.forgetting.measures import measures_to_jsonl
    from rlhf_core.rewards.verifying import verifier_name

    started = time.perf_counter()
    problems = problems_from_jsonl((materialise(context, dataset) / "evaluation.jsonl").read_bytes())
    outcomes, constant, measures = _asked(context, config, policy, problems, scorer, shares_base=shares_base)
    name = REWARD_MODEL if scorer else str(verifier_name(config.data))
    check_judged(outcomes, judge=name, most=config.ppo.max_abstained, what=f"held-out answers of {policy.uri}")
    metrics: dict[str, Any] = {"policy": policy.uri, "policy_digest": policy.digest}
    metrics |= evaluation_metrics(outcomes, name, SHOWN_CONFIDENCE)
    if constant is not None:
        metrics |= {"constant_answer": constant.answer, "constant_accuracy": constant.accuracy}
    metrics |= {f"forgetting/{each.suite}": each.mean for each in measures}
    metrics["seconds"] = time.perf_counter() - started
    say("evaluate", _sentence(metrics))
    key, source = identity
    if metrics["unjudged"]:  # the judge may answer the next time, so no later run finds this one
        key = stage_key("evaluate", config={"only": uuid4().hex}, inputs=[key], seed=0, source=source)
    return commit_stage(
        context,
        stage="evaluate",
        kind="evaluation",
        name=config.name,
        files={OUTCOMES: outcomes_to_jsonl(outcomes), MEASURES: measures_to_jsonl(measures)},
        key=key,
        parents=[policy, dataset, *([scorer] if scorer else [])],
        config=config,
        metrics=metrics,
        source=source,
    )


def _is_base_of(context: Context, config: PipelineConfig, policy: Parent, beside: Parent | None) -> bool:
    """Whether a policy is the whole model that the other's adapters are over."""
    if beside is None or beside.path or beside.digest == policy.digest:
        return False
    manifest = context.store.resolve(ArtifactRef(beside.uri, beside.digest))
    return manifest.has_adapters and base_of(context, config, beside).digest == policy.digest


class _Asked(NamedTuple):
    outcomes: list[Outcome]
    constant: ConstantAnswer | None
    measures: list[Measure]


def _asked(
    context: Context,
    config: PipelineConfig,
    policy: Parent,
    problems: list[Problem],
    scorer: Parent | None,
    *,
    shares_base: bool,
) -> _Asked:
    """Return what the policy made of each problem, the best constant answer of a verifier's, and what else it knows."""
    import torch

    from rlhf_core.data import PromptTemplate
    from rlhf_core.evaluation import best_constant
    from rlhf_core.evaluation import evaluate_policy as evaluate
    from rlhf_core.forgetting.suites import measure
    from rlhf_core.models.base import check_bases
    from rlhf_core.models.loading import load_tokenizer
    from rlhf_core.models.reward_model import RewardModel

    progress = Progress("evaluate", len(problems), f"{policy.uri} problem")
    base = base_of(context, config, policy)
    with scratch_directory(context.settings.home) as scratch:
        if policy.digest != base.digest and policy.uri.startswith("policy/"):
            # PPO's adapters are read once, here; in the cache they would only take room
            files = context.store.fetch(ArtifactRef(policy.uri, policy.digest), scratch, keep=False)
            policy = policy.model_copy(update={"path": str(files)})
        template = PromptTemplate(load_tokenizer(materialise(context, policy)), config.template)
        with _judge(context, config, template, scorer) as judge:
            model = load_policy(context, policy, base, config.evaluation.dtype, shares_base=shares_base)
            outcomes = evaluate(
                model, template, problems, config.evaluation, judge, on_progress=lambda done, _: progress.step(done)
            )
            measures = measure(
                model, template.tokenizer, config.evaluation.forgetting, dtype=getattr(torch, config.evaluation.dtype),
                allowed_modules=context.settings.reward_modules,
            )  # fmt: skip
            check_bases(model, judge if isinstance(judge, RewardModel) else None)
            return _Asked(outcomes, None if scorer else best_constant(problems, template, judge), measures)


@contextmanager
def _judge(context: Context, config: PipelineConfig, template: PromptTemplate, scorer: Parent | None) -> Iterator[Any]:
    """Yield who judges: the reward model, or the data's verifier, which is closed afterwards.

    Raises:
        ConfigError: if there is neither.
        ModelError: if the reward model reads other tokens than the policy.
    """
    from rlhf_core.models.compatibility import check_same_tokenizer
    from rlhf_core.models.loading import default_device, load_tokenizer
    from rlhf_core.rewards.verifying import judge_of

    if scorer is not None:
        directory = materialise(context, scorer)
        # it is given the policy's token ids, and any id is an input
        check_same_tokenizer(template.tokenizer, load_tokenizer(directory), what=f"the policy and {scorer.uri}")
        yield load_reward_model(context, scorer, base_of(context, config, scorer), "float32").to(default_device())
        return
    if judged_by_reward_model(config):
        raise ConfigError(nobody_judges(config))
    judge = judge_of(config, template=template, allowed_modules=context.settings.reward_modules)
    if judge is None:
        raise ConfigError(nobody_judges(config))
    with closing(judge):
        yield judge


def nobody_judges(config: PipelineConfig) -> str:
    """Return the sentence for an evaluation that has no judge."""
    if judged_by_reward_model(config):
        return "evaluation.judge is reward_model, but no reward model was given; name one with `reward_model`"
    return (
        "evaluation.judge is verifier, but the data has no answers to verify; set evaluation.judge to reward_model, "
        "or give problems with answers (data.problems, or data.demonstrations with data.verifier)"
    )


def _sentence(metrics: dict[str, Any]) -> str:
    ends = f"[{metrics['low']:.3f}, {metrics['high']:.3f}]"
    policy, count, cut = metrics["policy"], metrics["problems"], f"{metrics['truncated']:.2f} cut off"
    if "forgetting/text" in metrics:
        cut += f", packaged text {metrics['forgetting/text']:.3f} nats per token"
    if metrics["unjudged"]:
        cut += f", {metrics['unjudged']} more without a verdict"
    if "accuracy" not in metrics:
        return f"{policy}: mean score {metrics['score']:+.3f} {ends} of {count} answers by the reward model, {cut}"
    parts = [
        f"{policy}: {metrics['accuracy']:.3f} right {ends} of {count}",
        f"{metrics['well_formed']:.2f} well formed and {metrics['accuracy_given_form']:.3f} of those right",
        cut,
    ]
    if "constant_accuracy" in metrics:
        parts.append(
            f"always answering {metrics['constant_answer'][:20]!r} would be {metrics['constant_accuracy']:.3f} right"
        )
    return ", ".join(parts)

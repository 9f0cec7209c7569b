"""The real flow `pipeline`, whose stages store a few bytes in place of models: a night of seconds.

Flows, parameters, keys, references, commits, the gate's decision and the champion's alias are the product's; what needs
torch, Ray or a tokenizer is replaced here. Data, SFT, episodes, evaluations, gate, promotion and report are tasks; what
lies between them is called as functions, for a task's run takes longer than all that is done in it. Whatever a process
does at work, it notes at its site's desk.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from inspect import unwrap
from typing import Any

from prefect import Flow

import flows.begin
import flows.evaluate
import flows.pipeline
import flows.ppo
import flows.reward_model
import flows.sft
import tasks.context
import tasks.evaluate
import tasks.parents
import tasks.plan
import tasks.ppo
import tasks.preferences
import tasks.promote
import tasks.task_errors
from infra.artifacts import ArtifactRef, Manifest
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import DataError
from tasks.context import Context, open_context
from tasks.evaluate import OUTCOMES
from tasks.plan import Asker
from tasks.preflight import Models
from tasks.results import Decision, EpisodeResult, Parent, PPORun, StageResult
from tasks.stages import commit_stage, once_in_a_run, reuse_or_make, stage_key, stage_result
from tasks.task_errors import stage_task
from tests.night.notes import AFTER, Desk

STAGES = ("data", "sft", "reward-model", "ppo", "evaluate", "gate", "promote", "report")
"""Where a night can be held and struck. At the last one the champion's alias has moved."""
BASE = Parent(uri="model/stub", digest="0" * 64, path="/nowhere")
BODY = "stub.json"
PROMPTS = "preferences.jsonl"
"""A dataset's body, under the name by which the product knows that pairs can be sampled."""
SCORE = "score"
PROBLEMS = 64
"""All of them better is p = 2^-64: that passes however many nights of this year have spent of its error."""
STEP_S = 0.1
_FLOW: ContextVar[str] = ContextVar("flow", default="pipeline")
"""Which flow asks what its run began with: all of a night's are one flow run here."""


class Work:
    """A process at work at a stage of its night."""

    def __init__(self, config: PipelineConfig, stage: str) -> None:
        self.config, self.stage = config, stage
        self.context: Context = open_context()
        self.desk = Desk(self.context.settings.home / "night" / config.name).open()
        self.note("begins")
        if self.desk.is_held_at(stage):
            self.note("held")
            self.desk.await_leave()
            self.note("let go")
        if self.desk.is_to_fail_at(stage):
            self.note("failed")
            raise ConnectionResetError("the night's own: a server hung up")
        time.sleep(STEP_S)

    def note(self, what: str, **says: Any) -> None:
        """Write down that this very process is here."""
        self.desk.note(run=str(self.context.flow_run), stage=self.stage, what=what, says=says)

    def stored(self, kind: str, parents: list[Parent], body: dict[str, Any], **figures: Any) -> StageResult:
        """Store a few bytes as what the stage made, or find what it stored before."""
        facts = {"body": body, "figures": figures}
        inputs = [each.digest for each in parents]
        key = stage_key(f"stub-{kind}", config=facts, inputs=inputs, seed=self.config.seed, source="")

        def make() -> StageResult:
            return self.committed(kind, key, parents, body, **figures)

        return reuse_or_make(self.context, stage=self.stage, kind=kind, name=self.config.name, key=key, make=make)

    def committed(
        self,
        kind: str,
        key: str,
        parents: list[Parent],
        body: dict[str, Any],
        *,
        name: str | None = None,
        **figures: Any,
    ) -> StageResult:
        """Store a few bytes under a key."""
        body = {"kind": kind, **body}  # or two kinds with the same score would hold the same weights
        made = commit_stage(
            self.context,
            stage=self.stage,
            kind=kind,
            name=name or self.config.name,
            files={PROMPTS if self.stage == "data" else BODY: json.dumps(body).encode()},
            key=key,
            parents=parents,
            config=self.config,
            metrics={"seconds": STEP_S, **figures},
            source="stub",
        )
        self.note("committed", uri=made.uri)
        return made

    def manifest(self, parent: Parent | StageResult) -> Manifest:
        """Return what the store says of an input."""
        return self.context.store.resolve(ArtifactRef(parent.uri, parent.digest))


def settle_models(_: PipelineConfig, *, actor: str | None, reward_model: str | None, **__: Any) -> Models:
    """Take what is named."""
    return Models(actor, reward_model)


def prepare_data(config: PipelineConfig, reference: str | None, **_: Any) -> StageResult:
    """Return the dataset that is named, or store what lies at the desk today."""
    if reference is not None:
        return stage_result("data", open_context().store.resolve(reference), reused=True)
    return store_data(config)


@stage_task(name="prepare-data")
def store_data(config: PipelineConfig) -> StageResult:
    """Store what lies at the desk today."""
    work = Work(config, "data")
    data = work.desk.data()
    if data.get("fault"):
        raise DataError(data["fault"])
    body = {**data, "run": str(work.context.flow_run)}
    return once_in_a_run(work.context, "data", lambda: work.stored("dataset", [], body))


@stage_task(name="train-sft")
def train_sft(config: PipelineConfig, dataset: Parent, actor: str | None = None) -> StageResult:
    """Go on from the champion that there was when the night came here first, if there was one."""
    del actor
    work = Work(config, "sft")
    champion = work.context.store.alias("policy", config.name, "champion")
    score, after = 0, ""
    if champion is not None:
        crowned = work.context.store.resolve(champion)
        score, after = int(str(crowned.metrics[SCORE])), crowned.ref.uri
    # told by a figure and no parent: as the product's, a night's lineage ends at the base model, and does not grow
    figures = {SCORE: score, AFTER: after}
    return once_in_a_run(work.context, "sft", lambda: work.stored("sft", [dataset, BASE], figures, **figures))


def sample_pairs(
    context: Context, config: PipelineConfig, dataset: Parent, policy: Parent, key: str, source: str
) -> StageResult:
    """Store pairs without samples."""
    del context, source
    name = f"{config.name}-preferences"
    return Work(config, "reward-model").committed("dataset", key, [dataset, policy], {}, name=name)


def train_reward_model(config: PipelineConfig, pairs: Parent, policy: Parent) -> StageResult:
    """Store a reward model that knows nothing."""
    return Work(config, "reward-model").stored("reward-model", [pairs, policy], {})


@stage_task(name="episode")
def ppo_episode(run: PPORun, episode: int) -> EpisodeResult:
    """Commit an episode's state under the run's name."""
    work = Work(run.config, "ppo")
    work.context.store.commit(
        "ppo-state",
        run.name,
        {"state.json": json.dumps({"episode": episode, "actor": run.actor.digest}).encode(), "samples.jsonl": b""},
        parents=[ArtifactRef(run.actor.uri, run.actor.digest)],
        flow_run=work.context.flow_run,
        version=episode + 1,
    )
    work.note("committed", uri=f"ppo-state/{run.name}@{episode + 1}")
    return EpisodeResult(run=run.name, episode=episode, policy_version=episode + 1, incarnation="stub", row={})


def publish_policy(run: PPORun, _: int | None = None, *, is_over: bool = True) -> StageResult:  # noqa: ARG001
    """Store a policy that is better than its SFT model, or worse, as the data say."""
    work = Work(run.config, "ppo")
    gain = work.context.store.read_json(work.manifest(run.dataset), PROMPTS)["gain"]
    score = int(str(work.manifest(run.actor).metrics[SCORE])) + int(gain)
    parents = [run.actor, run.dataset, *([run.reward_model] if run.reward_model else [])]
    return work.committed("policy", run.key, parents, {"score": score}, **{SCORE: score})


def make_evaluation(
    context: Context,
    config: PipelineConfig,
    policy: Parent,
    dataset: Parent,
    scorer: Parent | None,
    identity: Any,
    *,
    shares_base: bool,
) -> StageResult:
    """Store the policy's score on every problem."""
    del scorer, shares_base
    score = 0 if policy.uri == BASE.uri else context.store.resolve(policy.uri).metrics[SCORE]
    figures = {"judge": "verifier", "policy": policy.uri, "policy_digest": policy.digest, SCORE: score}
    parents = [each for each in (policy, dataset) if each.path is None]
    return Work(config, "evaluate").committed("evaluation", identity[0], parents, {OUTCOMES: score}, **figures)


def scores(evaluation: StageResult) -> dict[str, float]:
    """Return a stored score once for each problem."""
    return {str(problem): float(evaluation.metrics[SCORE]) for problem in range(PROBLEMS)}


@stage_task(name="write-report")
def write_report(
    config: PipelineConfig, stages: list[StageResult], *_: Any, champion: str | None = None, wall_s: float
) -> str:
    """Store the last artifact of the night."""
    del wall_s, champion
    work = Work(config, "report")
    parents = [each.parent for each in stages]
    return work.committed("run", str(work.context.flow_run), parents, {}).uri


def _at_work(stage: str, task: Any) -> Any:
    """Return a task of the product, which first is at work at its stage."""

    def call(first: Any, *rest: Any, **further: Any) -> Any:
        config = first if isinstance(first, PipelineConfig) else _config_of(first)
        Work(config, stage)
        return task(first, *rest, **further)

    return call


def _config_of(decision: Decision) -> PipelineConfig:
    found = open_context().store.resolve(decision.policy)
    return PipelineConfig.model_validate(found.config)


def _within(stage: Flow[..., Any]) -> Any:
    """Return a stage's flow without a run of its own, which costs as much time as all else in it."""
    body = unwrap(stage.fn)

    def call(**parameters: Any) -> Any:
        token = _FLOW.set(stage.name)
        try:
            return body(**parameters).data
        finally:
            _FLOW.reset(token)

    return call


def _asked_by_flow(asker_of: Callable[[Context], Asker | None]) -> Callable[[Context], Asker | None]:
    """Return who asks, as if each stage's flow had a run of its own."""

    def call(context: Context) -> Asker | None:
        found = asker_of(context)
        return found and found._replace(call=_FLOW.get())

    return call


def nothing(*_: Any, **__: Any) -> None:
    """Stand for what a night of bytes has no use for."""


REPLACED: tuple[tuple[Any, str, Any], ...] = (
    (tasks.context, "open_default_store", cache(tasks.context.open_default_store)),
    (tasks.context, "settings", cache(tasks.context.settings)),
    (tasks.context, "root_flow_run", cache(tasks.context.root_flow_run)),
    (flows.pipeline, "sft", _within(flows.pipeline.sft)),
    (flows.pipeline, "train_reward_model", _within(flows.pipeline.train_reward_model)),
    (flows.pipeline, "ppo", _within(flows.pipeline.ppo)),
    (flows.pipeline, "evaluate", _within(flows.pipeline.evaluate)),
    (tasks.plan, "asker_of", asker_of := _asked_by_flow(tasks.plan.asker_of)),
    (tasks.ppo, "asker_of", asker_of),
    (tasks.task_errors, "give_memory_back", nothing),
    (flows.begin, "preflight", lambda config, **_: config),
    (flows.begin, "settle_models", settle_models),
    (flows.begin, "prepare_data", prepare_data),
    (flows.begin, "check_data", nothing),
    (flows.sft, "train_sft", train_sft),
    (flows.sft, "show_training", nothing),
    (tasks.preferences, "_sample_pairs", sample_pairs),
    (flows.reward_model, "find_policy", flows.reward_model.find_policy.fn),
    (flows.reward_model, "collect_preferences", flows.reward_model.collect_preferences.fn),
    (flows.reward_model, "train_reward_model", train_reward_model),
    (flows.reward_model, "show_training", nothing),
    (tasks.ppo, "left_by_other_code", nothing),
    (flows.ppo, "plan_ppo", flows.ppo.plan_ppo.fn),
    (flows.ppo, "ppo_episode", ppo_episode),
    (flows.ppo, "publish_policy", publish_policy),
    (flows.ppo, "end_cluster", nothing),
    (flows.ppo, "show_episodes", nothing),
    (flows.evaluate, "find_judge", flows.evaluate.find_judge.fn),
    (flows.evaluate, "show_evaluations", nothing),
    (tasks.parents, "base_model", lambda *_: BASE),
    (tasks.evaluate, "base_model", lambda *_: BASE),
    (tasks.evaluate, "_make", make_evaluation),
    (tasks.promote, "_scores", scores),
    (tasks.promote, "conditions_of", lambda *_: ()),
    (flows.pipeline, "gate", _at_work("gate", flows.pipeline.gate)),
    (flows.pipeline, "promote", _at_work("promote", flows.pipeline.promote)),
    (flows.pipeline, "write_report", write_report),
)


def stand_in() -> Flow[..., Any]:
    """Replace the stages of this process, and return the flow that calls them.

    Raises:
        ImportError: the product has no such stage any longer.
    """
    for module, name, stub in REPLACED:
        if not hasattr(module, name):
            raise ImportError(
                f"{module.__name__} has no {name!r} any longer: the stub replaces nothing; look for its heir"
            )
        setattr(module, name, stub)
    return flows.pipeline.pipeline

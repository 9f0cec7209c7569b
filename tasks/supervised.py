"""SFT and the reward model as stages: each in this process, or on several ranks of a Ray cluster that ends with it."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rlhf_core.config import PipelineConfig
from tasks.clusters import address_of, end_cluster, lease_for
from tasks.context import Context, materialise, open_context
from tasks.failures import first_line
from tasks.gpu_allocation import ADVICE, available_gpus, trainer_share
from tasks.parents import BASE_MODEL, base_of, resolve_policy
from tasks.progress import say
from tasks.results import Parent, StageResult
from tasks.reward_model import RewardModelTraining
from tasks.run_log import run_logger
from tasks.sft import SFTTraining, problems_of
from tasks.source import source_digest
from tasks.stages import once_in_a_run, reuse_or_make, stage_key
from tasks.task_errors import stage_task

if TYPE_CHECKING:
    from rlhf_core.config import ClusterConfig, TrainersConfig
    from rlhf_core.config.strategy import AdapterTrainersConfig
    from rlhf_core.ray_tools.group import Tell

MODULES = ("supervised", "models", "gpu_allocation")
"""Besides what the stage's own module is called."""
ANSWER_S = 30.0
"""Longest wait for an actor that has nothing to do but answer."""
_CALLED_BACK_S = 0.2
"""Ray ends a future in another thread, soon after the call has ended."""
OBJECT_STORE_MB = 80
"""As little as Ray takes: nothing goes through it."""


@stage_task(name="train-sft")
def train_sft(config: PipelineConfig, dataset: Parent, actor: str | None = None) -> StageResult:
    """Return the SFT model of a start and of the dataset's demonstrations.

    Args:
        config: the resolved preset.
        dataset: holds them in sft.jsonl, and in evaluation.jsonl those that the loss is measured on.
        actor: SFT model or policy to go on from; None starts from the preset's base model.

    Raises:
        DataError: if there is no demonstration.
    """
    from rlhf_core.data.problems import refuse_nothing_to_learn

    context = open_context()
    refuse_nothing_to_learn(problems_of(materialise(context, dataset), "sft"), where=dataset.uri)
    start = resolve_policy(context, config, actor or BASE_MODEL)
    source = source_digest("sft", *MODULES)
    facts = config.model_dump(mode="json", include={"template", "sft"})
    key = stage_key("sft", config=facts, inputs=[dataset.digest, start.digest], seed=config.seed, source=source)
    work = SFTTraining(config, dataset, start, base_of(context, config, start), key, source, context.flow_run)
    return _found_or_trained(work, stage="sft", trainers=config.sft, context=context)


@stage_task(name="train-reward-model")
def train_reward_model(config: PipelineConfig, pairs: Parent, policy: Parent) -> StageResult:
    """Return a reward model on the policy's trunk, trained on most pairs and measured on the others."""
    context = open_context()
    source = source_digest("reward_model", *MODULES)
    facts = config.model_dump(mode="json", include={"template", "reward_model"})
    inputs = [pairs.digest, policy.digest]
    key = stage_key("reward-model", config=facts, inputs=inputs, seed=config.seed, source=source)
    work = RewardModelTraining(config, pairs, policy, base_of(context, config, policy), key, source, context.flow_run)
    return _found_or_trained(work, stage="reward-model", trainers=config.reward_model, context=context)


def _found_or_trained(
    work: SFTTraining | RewardModelTraining, *, stage: str, trainers: AdapterTrainersConfig, context: Context
) -> StageResult:
    """Return a stage's result: made before in this run, held by the store under its key, or trained now."""
    name = work.config.name

    def make() -> StageResult:
        if trainers.lora is not None and trainers.not_shared is not None:
            say(stage, f"the weights below its adapters are its own, not shared: {trainers.not_shared}")
        if trainers.is_alone:
            return work.done(context)
        made: StageResult = run_on_ranks(
            work,
            stage=stage,
            name=f"{stage}-{name}-{work.key[:12]}",
            trainers=trainers,
            cluster=work.config.ppo.cluster,
            context=context,
        )
        return made

    return once_in_a_run(
        context, stage, lambda: reuse_or_make(context, stage=stage, kind=stage, name=name, key=work.key, make=make)
    )


def run_on_ranks(
    work: Callable[[Tell], Any],
    *,
    stage: str,
    name: str,
    trainers: TrainersConfig,
    cluster: ClusterConfig,
    context: Context,
) -> Any:
    """Do a piece of work on every rank, each in an actor on a cluster of this run, and return the first rank's result.

    Args:
        work: is given what takes its lines for the run's log; crosses to the actors, and what it returns crosses back.
        stage: for the log.
        name: of the run's cluster.
        trainers: how many ranks, and by which strategy they train.
        cluster: what each gets of the machine, and how long is waited.
        context: of the stage.

    Raises:
        LostRankError: if a rank died.
        TimeoutError: if one does not answer, or nothing was told for `cluster.episode_timeout_s`.
    """
    from infra.clusters import connect

    started, number = time.monotonic(), trainers.num_trainers
    record = lease_for(
        name,
        cluster,
        context,
        num_trainers=number,
        num_cpus=number * cluster.trainer_threads,
        object_store_mb=cluster.object_store_mb or OBJECT_STORE_MB,
    )
    try:
        connect(record)
        share = trainer_share(cluster, available_gpus(address_of(cluster)), number)
        actors = _group(work, stage, number, cluster, share)
        ranks = f"{number} rank{'s' if number > 1 else ''} ({trainers.strategy})"
        say(stage, f"{ranks} ready in {time.monotonic() - started:.0f} s")
        return _first_result(actors, cluster)
    finally:
        end_cluster(name)


def _group(
    work: Callable[[Tell], Any], stage: str, number: int, cluster: ClusterConfig, share: float
) -> dict[str, Any]:
    """Return the actors by name, the first rank first, in one group if they are several."""
    from rlhf_core.ray_tools.calls import wait_for_all
    from rlhf_core.ray_tools.group import RankActor, form_group
    from rlhf_core.ray_tools.placement import place, resources

    actor_class: Any = RankActor  # decorated with ray.remote, it has .options and .remote, which its type does not show
    names = [f"{stage}-{rank}" for rank in range(number)]
    options = dict.fromkeys(names, resources(cluster.trainer_threads, share))
    placed = place(options, group=stage, timeout_s=cluster.start_timeout_s, advice=ADVICE)
    actors = {name: actor_class.options(name=name, **placed[name]).remote(work) for name in names}
    wait_for_all(
        {actor.ping.remote(): name for name, actor in actors.items()},
        cluster.start_timeout_s,
        what="ranks to start",
        setting="ppo.cluster.start_timeout_s",
    )
    if number > 1:
        form_group(
            actors,
            start_timeout_s=cluster.start_timeout_s,
            collective_timeout_s=cluster.collective_timeout_s,
        )
    return actors


def _first_result(actors: Mapping[str, Any], cluster: ClusterConfig) -> Any:
    """Have all ranks work, and return what the first one does; its lines go into the run's log as they come."""
    from rlhf_core.ray_tools.calls import wait_for, wait_for_all

    calls = {actor.run.remote(): name for name, actor in actors.items()}
    first, leader = next(iter(calls)), next(iter(actors.values()))

    def late(_: Sequence[str]) -> Exception:
        return TimeoutError(
            f"waited {cluster.episode_timeout_s:.0f} s for a line from {calls[first]}, and none came; raise "
            "ppo.cluster.episode_timeout_s, or look into the cluster's log"
        )

    def log_the_rest() -> None:
        with suppress(TimeoutError):  # of one that is silent, what ended the wait says more
            _log_lines(leader)
        _log_what_others_met(calls, first)

    try:
        (result,) = wait_for(
            {first: calls[first]},
            cluster.episode_timeout_s,
            late=late,
            members=actors,
            answer_s=ANSWER_S,
            look=lambda: _log_lines(leader),
        )
    except Exception:
        log_the_rest()
        raise
    log_the_rest()
    wait_for_all(
        calls,
        cluster.collective_timeout_s,
        what="the other ranks to end",
        setting="ppo.cluster.collective_timeout_s",
    )
    return result


def _log_lines(leader: Any) -> bool:
    """Write what the first rank has told since into the log; return whether it told anything.

    A rank that has ended is not asked: its own call reports that better.
    """
    import ray

    from rlhf_core.ray_tools.calls import ask

    try:
        lines: list[str] = ask(leader.lines, ANSWER_S)
    except ray.exceptions.RayActorError:
        return False
    for line in lines:
        run_logger().info("%s", line)
    return bool(lines)


def _log_what_others_met(calls: Mapping[Any, str], first: Any) -> None:
    """Write into the log why other ranks failed: the first may say only that one did."""
    import ray

    others = {reference.future(): name for reference, name in calls.items() if reference != first}
    for future in concurrent.futures.wait(others, timeout=_CALLED_BACK_S).done:
        error = future.exception()
        if isinstance(error, ray.exceptions.RayError):
            run_logger().warning("%s: %s", others[future], first_line(error))

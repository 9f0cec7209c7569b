"""PPO: one task an episode, on the run's own cluster; the store says which episode is due."""

from __future__ import annotations

from typing import Any

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import RlhfError
from tasks.context import (
    open_context,
    resolve_policy,
    resolve_reward_model,
    source_digest,
    stage_key,
    stage_result,
)
from tasks.progress import duration, say
from tasks.results import EpisodeResult, Parent, PPORun, StageResult
from tasks.sentences import run_logger, stage_task

MODULES = ("ppo", "ppo_group", "ppo_keeper", "ppo_models")
POLL_S = 2.0


@stage_task(name="plan-ppo")
def plan_ppo(config: PipelineConfig, actor: str | None, reward_model: str | None, dataset: Parent) -> PPORun:
    """Return the run that this configuration and these inputs name: the same ones always name the same run."""
    context = open_context()
    policy = resolve_policy(context, config, actor)
    scorer = resolve_reward_model(context, config, reward_model)
    source = source_digest(*MODULES)
    facts = config.model_dump(mode="json", include={"template", "ppo"})
    inputs = [policy.digest, scorer.digest if scorer else "", dataset.digest]
    key = stage_key("ppo", config=facts, inputs=inputs, seed=config.seed, source=source)
    return PPORun(
        name=f"{config.name}-{key[:12]}",
        key=key,
        preset=config.name,
        config=config.model_dump(mode="json"),
        actor=policy,
        reward_model=scorer,
        dataset=dataset,
        source_digest=source,
        flow_run=context.flow_run,
    )


def finished_policy(run: PPORun, *, reused: bool) -> StageResult | None:
    """Return the run's policy if the store holds it."""
    manifest = open_context().store.find("policy", run.key)
    return stage_result("ppo", manifest, reused=reused) if manifest else None


def next_episode(run: PPORun) -> int:
    """Return the first episode that is not committed."""
    manifest = open_context().store.latest("ppo-state", run.name)
    return manifest.version if manifest else 0


def _may_pass(_task: Any, _task_run: Any, state: Any) -> bool:
    """Retry what a new trainer group can mend (a dead process, a late answer); never a bug or a bad number."""
    import ray

    from rlhf_core.detached.dealer import MakersLostError

    error = state.result(raise_on_failure=False)
    if isinstance(error, ray.exceptions.RayTaskError):  # raised inside an actor: what it raised decides
        error = error.cause
    return isinstance(error, ray.exceptions.RayActorError | MakersLostError | TimeoutError | ConnectionError)


@stage_task(
    name="episode",
    task_run_name="episode {episode}",
    retries=2,
    retry_delay_seconds=2,
    retry_condition_fn=_may_pass,
)
def ppo_episode(run: PPORun, episode: int) -> EpisodeResult:
    """Run one episode, and any before it that a death cost, and return its figures.

    Its state is committed beside the next episode, which begins by waiting for that.
    """
    from tasks.ppo_group import trainer_for

    context = open_context()
    config = PipelineConfig.model_validate(run.config).ppo
    trainer = trainer_for(run, episode, context)
    with _ending_the_group_on_failure(run):
        due = _ask(trainer.position, 30).next_episode
        for current in range(due, episode + 1):
            record = _follow(trainer, trainer.run_episode.remote(current), config.cluster.episode_timeout_s)
            _say_episode(record, config.episodes)
        if episode + 1 == config.episodes:
            _ask(trainer.await_commit, config.cluster.commit_timeout_s + 30)
    return EpisodeResult(
        run=run.name,
        episode=episode,
        policy_version=record.policy_version,
        incarnation=record.incarnation,
        row=record.as_row(),
    )


@stage_task(name="publish-policy", retries=2, retry_delay_seconds=2, retry_condition_fn=_may_pass)
def publish_policy(run: PPORun) -> StageResult:
    """Store the finished policy, from the trainer that holds it, and return its reference."""
    from tasks.ppo_group import trainer_for

    context = open_context()
    config = PipelineConfig.model_validate(run.config).ppo
    trainer = trainer_for(run, config.episodes, context)
    with _ending_the_group_on_failure(run):
        _follow(trainer, trainer.commit_policy.remote(), config.cluster.commit_timeout_s)
    result = finished_policy(run, reused=False)
    if result is None:
        raise RlhfError(
            f"the policy of run {run.name} was stored, but is not found under its key; is the store's index intact?"
        )
    say("ppo", f"policy stored as {result.uri}")
    return result


class _ending_the_group_on_failure:  # noqa: N801 - reads as a clause
    """Ends the actors when an attempt fails, so that the next one restores committed state and nothing else."""

    def __init__(self, run: PPORun) -> None:
        self._run = run

    def __enter__(self) -> None:
        """Begin the attempt."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """End the group if the attempt failed."""
        import ray

        from tasks.ppo_group import end_group

        if error is None or not isinstance(error, Exception):
            return
        try:
            end_group(self._run)
        except (ray.exceptions.RayError, RuntimeError, OSError) as trouble:
            run_logger().warning("the trainer group of %s could not be ended: %s", self._run.name, trouble)


def _ask(method: Any, timeout_s: float) -> Any:
    import ray

    return _unwrapped(lambda: ray.get(method.remote(), timeout=timeout_s))


def _follow(trainer: Any, reference: Any, timeout_s: float) -> Any:
    """Wait for `reference`, writing what the trainer does into the run's log as it changes."""
    import time

    import ray

    deadline, said = time.monotonic() + timeout_s, ""
    while True:
        done, _ = ray.wait([reference], timeout=POLL_S)
        if done:
            return _unwrapped(lambda: ray.get(reference))
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for the trainer, which was last seen at: {said}")
        doing = _ask(trainer.progress, 30)
        if doing != said:
            run_logger().debug("%s", doing)
            said = doing


def _unwrapped(call: Any) -> Any:
    """Return what `call` returns; an error that an actor raised is raised as itself, not as Ray's wrapper."""
    import ray

    try:
        return call()
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RlhfError):
            raise error.cause from error
        raise


def _say_episode(record: Any, episodes: int) -> None:
    left = (episodes - record.episode - 1) * sum(record.seconds.values())
    metrics = record.metrics
    say(
        "ppo",
        f"episode {record.episode + 1}/{episodes}  reward {metrics['reward']:.3f}  verifier {metrics['verifier']:.3f}  "
        f"KL {metrics['kl']:.4f}  length {metrics['length']:.1f}  "
        + (f"{duration(left)} left in this stage" if left else f"took {duration(sum(record.seconds.values()))}"),
    )


def end_cluster(run: PPORun) -> None:
    """End the run's cluster and everything on it, and wait until it is gone; nothing if it never started."""
    from infra.clusters import disconnect, release_cluster

    disconnect()
    release_cluster(run.name)

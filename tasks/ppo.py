"""PPO: one task an episode, on the run's own cluster; the store says which episode is due."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from infra.artifacts.ref import EXTERNAL_PREFIX
from infra.errors import InfraError
from rlhf_core.config import PipelineConfig, StopConfig
from rlhf_core.counting import ordinal
from rlhf_core.errors import RlhfError
from rlhf_core.ppo.best import DEVELOPMENT
from tasks.budget import why_it_ends_before
from tasks.clusters import address_of
from tasks.context import Context, open_context
from tasks.parents import base_model, base_of, ppo_wants_reward_model, resolve_policy, resolve_reward_model
from tasks.plan import asker_of, recalled, recorded, settled_once
from tasks.progress import duration, say
from tasks.results import KEPT, RUN, EpisodeResult, Parent, PPORun, StageResult
from tasks.run_log import run_logger
from tasks.showing import DEADLINE_S, only_shows
from tasks.source import source_digest
from tasks.stages import find_made, stage_key, stage_result
from tasks.taken_over import leave_if_taken_over
from tasks.task_errors import stage_task

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infra.artifacts import ArtifactStore, Manifest
    from rlhf_core.models.base import Base
    from rlhf_core.ppo.state import EpisodeRecord

HIGH_RANK = 128
"""From this rank on the log says so: a night that begins from the policy of the night before adds its own ranks."""
MODULES = ("ppo", "ppo_group", "ppo_keeper", "ppo_models", "models", "gpu_allocation")


@stage_task(name="plan-ppo")
def plan_ppo(config: PipelineConfig, actor: str | None, reward_model: str | None, dataset: Parent) -> PPORun:
    """Return the run that this configuration and these inputs name: the same ones always name the same run.

    A flow run that is started again goes on with what it was, with other code too.
    """
    context = open_context()

    def find() -> PPORun:
        policy = resolve_policy(context, config, actor)
        scorer = resolve_reward_model(context, config, reward_model) if ppo_wants_reward_model(config) else None
        run = _run_of(context, config, policy, scorer, dataset)
        if config.ppo.lora is not None and not run.shares_base:
            say("ppo", f"each process holds weights of its own below its adapters: {config.ppo.not_shared}")
        _check_bases(run)
        inputs = {name: getattr(run, name) for name in ("actor", "base", "reward_model_base")}
        return run.model_copy(update={name: each and _elsewhere(each) for name, each in inputs.items()})

    before: PPORun = settled_once(context, "run", PPORun, find)
    is_base = before.actor.uri.startswith(EXTERNAL_PREFIX)
    policy = base_model(context, before.config) if is_base else before.actor
    now = _run_of(context, before.config, policy, before.reward_model, before.dataset)
    return _with_code_of_now(context, before, now)


def _check_bases(run: PPORun) -> None:
    """Check that this machine can hold the reward model besides, where it is not over the policy's base.

    Raises:
        ModelError: if it cannot.
    """
    from infra.settings import settings
    from rlhf_core.models.memory import check_memory_for

    other = run.reward_model_base
    if not run.shares_base or run.base is None or other is None or other.digest == run.base.digest:
        return
    is_whole = other == run.reward_model
    what = "a whole model" if is_whole else f"adapters over {other.uri}"
    say("ppo", f"the reward model is {what}, the policy is over {run.base.uri}: both are held")
    if address_of(run.config.ppo.cluster) is None:
        check_memory_for(run.config, settings().models_dir, reward_adapters=not is_whole, bases=1 if is_whole else 2)


def _elsewhere(parent: Parent) -> Parent:
    """Return an input without its path on this machine: a record holds none."""
    return parent.model_copy(update={"path": None})


def _run_of(context: Context, config: PipelineConfig, policy: Parent, scorer: Parent | None, dataset: Parent) -> PPORun:
    """Return the run of these inputs with the code of now."""
    from rlhf_core.rewards.resolve import code_digest
    from rlhf_core.rewards.verifying import asks_for_answers, judge_facts

    source = source_digest(*MODULES)
    facts = config.model_dump(mode="json", include={"template", "ppo"})
    facts["verifier"] = judge_facts(config) if asks_for_answers(config.data) else None
    facts["functions"] = {name: code_digest(name) for name in config.ppo.reward.functions}
    if config.ppo.evaluate_every:  # which episode is kept depends on who judges, and how
        facts["evaluation"] = config.evaluation.model_dump(mode="json", exclude={"forgetting"})
    # When a run gives up changes no number: with another limit it goes on from its last commit.
    del facts["ppo"]["max_abstained"]
    # The makers, where they run and how long is waited change no number; the number of threads does.
    facts["ppo"]["cluster"] = {name: facts["ppo"]["cluster"][name] for name in ("trainer_threads", "maker_threads")}
    base = base_of(context, config, policy)
    inputs = [policy.digest, scorer.digest if scorer else "", dataset.digest]
    key = stage_key("ppo", config=facts, inputs=inputs, seed=config.seed, source=source)
    return PPORun(
        name=f"{config.name}-{key[:12]}",
        key=key,
        preset=config.name,
        config=config,
        actor=policy,
        reward_model=scorer,
        dataset=dataset,
        base=base,
        reward_model_base=None if scorer is None else base_of(context, config, scorer),
        source_digest=source,
        flow_run=context.flow_run,
    )


def _with_code_of_now(context: Context, before: PPORun, now: PPORun) -> PPORun:
    """Return a run that is started again, as it goes on with the code of now.

    What other code makes of it, in whole or in part, has a name and a key that hold the flow run's id: no other run
    finds that in place of what one code alone would have made.
    """
    # with paths of this machine
    here = {"actor": now.actor, "base": now.base, "reward_model_base": now.reward_model_base}
    if before.base is None:
        here |= {"base": None, "reward_model_base": None}
    question = "run with other code"
    other: PPORun | None = recalled(context, question, PPORun)
    if other is None and (now.key == before.key or find_made(context, "policy", before.preset, before.key)):
        return before.model_copy(update=here)
    if other is None:
        mixed = {"goes on from": before.key, "in": str(asker_of(context))}
        key = stage_key("ppo", config=mixed, inputs=[], seed=0, source="")
        name = f"{before.preset}-{key[:12]}"
        own = before.model_copy(update={"name": name, "key": key, "continues": before.name})
        other = recorded(context, question, PPORun, own)
    say(
        "ppo",
        f"the code has changed since this run began (source {before.source_digest[:12]}, now "
        f"{now.source_digest[:12]}): it goes on from its last commit with the code of now, as ppo-state/{other.name}, "
        "which no other run takes up",
    )
    return other.model_copy(update=here | {"source_digest": now.source_digest})


def finished_policy(run: PPORun, *, reused: bool, episodes: int | None = None) -> StageResult | None:
    """Return the run's policy, under its project's name, if the store holds it.

    Args:
        run: of PPO.
        reused: whether it was there before.
        episodes: after which a night ended; None: after the last.
    """
    manifest = find_made(open_context(), "policy", run.preset, run.key_of_policy(episodes))
    if manifest is None:
        return None
    if reused:
        say("ppo", f"{manifest.ref.uri} is in the store already")
    return stage_result("ppo", manifest, reused=reused)


def next_episode(run: PPORun) -> int:
    """Return the first episode that is not committed; where a run that was left half done stays so, say why."""
    from tasks.ppo_keeper import last_state

    store = open_context().store
    manifest = last_state(store, run)
    if manifest is not None:
        say(
            "ppo",
            f"goes on from {manifest.uri}: {manifest.version} of {run.config.ppo.episodes} episodes are done",
        )
        return manifest.version
    if left := left_by_other_code(store, run):
        say(
            "ppo",
            f"begins with the first episode: {left.uri} is of the same configuration, but was made by other code "
            f"(source {left.source_digest[:12]}, now {run.source_digest[:12]}), and is not gone on with",
        )
    elif left := left_by_a_budget(store, run):
        say(
            "ppo",
            f"begins with the first episode: {left.uri}, which a night's budget ended, is not gone on with, for "
            f"{what_differs(left, run)}",
        )
    return 0


class Ended(NamedTuple):
    """Why a run's episodes end before the last one."""

    why: str
    is_over: bool
    """Whether no later night goes on."""


def ends_before(run: PPORun, episode: int, last: EpisodeResult | None) -> Ended | None:
    """Return why a run's episodes end before one that is due; None if it begins.

    Args:
        run: of PPO.
        episode: that is due, from 0.
        last: the episode before, if it ran just now; else the store knows it.
    """
    figures, stops = (last.row, last.stops) if last else _stored(run)
    ended = None if stops is None else Ended(f"PPO stops after {episode} episodes: {stops}", is_over=True)
    if ended is None and (why := why_it_ends_before(run, episode, figures)) is not None:
        ended = Ended(why, is_over=False)
    if ended is not None:
        say("ppo", ended.why)
    return ended


def _stored(run: PPORun) -> tuple[Mapping[str, Any], str | None]:
    """Return the figures of the last committed episode, and why the run stops with it."""
    from rlhf_core.ppo.best import why_it_stops
    from tasks.ppo_keeper import STATE, last_state

    config, stops_early = run.config.ppo, run.config.ppo.stop != StopConfig()
    if not (stops_early or run.config.budget.is_set) or finished_policy(run, reused=True):
        return {}, None
    store = open_context().store
    state = last_state(store, run)
    if state is None or not stops_early:
        return state.metrics if state else {}, None
    rows = [record["metrics"] for record in store.read_json(state, STATE)["history"]]
    return state.metrics, why_it_stops(rows, config)


def left_by_a_budget(store: ArtifactStore, run: PPORun) -> Manifest | None:
    """Return the last state of another run that a night's budget ended, if the latest policy of the name is its."""
    policy = store.latest("policy", run.preset)
    name = None if policy is None else policy.metrics.get(RUN)
    state = store.latest("ppo-state", str(name)) if name and name != run.name else None
    return None if state is None or state.has_ended else state


def what_differs(state: Manifest, run: PPORun) -> str:
    """Return in what a run differs from another one, of which this is a state."""
    found = dict(zip(("policy", "reward model", "data"), (run.actor, run.reward_model, run.dataset), strict=True))
    held = {parent.digest for parent in state.parents}
    told = [f"its {what} is now {each.uri}" for what, each in found.items() if each and each.digest not in held]
    ours = run.config.model_dump(mode="json", include={"template", "ppo", "seed"})
    if changed := sorted(key for key in _leaves(ours) if not _agree(_at(state.config, key), _at(ours, key))):
        told.append(f"the configuration has other {', '.join(changed)}")
    return " and ".join(told) or "it was made by other code or judged by others"


def _leaves(config: Any, path: str = "") -> list[str]:
    if not isinstance(config, dict) or not config:
        return [path]
    return [leaf for name, each in config.items() for leaf in _leaves(each, f"{path}.{name}" if path else name)]


def _at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config


def left_by_other_code(store: ArtifactStore, run: PPORun) -> Manifest | None:
    """Return the last state of a run that would have been this one with this code, and has no policy; None if none."""
    finished = {manifest.key[:12] for manifest in store.list("policy", run.preset) if manifest.key}
    config = run.config.model_dump(mode="json")
    left = [
        manifest
        for manifest in store.list("ppo-state")
        if manifest.source_digest != run.source_digest
        and not manifest.has_ended
        and manifest.name.startswith(f"{run.preset}-")
        and manifest.name.removeprefix(f"{run.preset}-") not in finished
        and _agree(manifest.config, config)
    ]
    return max(left, key=lambda manifest: manifest.created, default=None)


def _agree(old: Any, new: Any) -> bool:
    """Whether two configurations agree in every key that both releases know."""
    if isinstance(old, dict) and isinstance(new, dict):
        return all(_agree(old[name], new[name]) for name in old.keys() & new.keys())
    return bool(old == new)


def delete_states(run: PPORun) -> None:
    """Replace the training states of a run whose policy is stored by a version after the last episode's.

    That has no tensors; it is there because a number is not given again. They stay where RLHF_RETENTION says how many
    states are kept, or how many policies: one that is deleted is stored again from them.
    """
    from infra.artifacts import Retention
    from infra.artifacts.manifest import ENDED
    from tasks.ppo_keeper import SAMPLES, STATE

    try:
        context = open_context()
        store, named = context.store, Retention.parse(context.settings.retention).named
        last = store.latest("ppo-state", run.name)
        if last is None or {"ppo-state", "policy"} & set(named):
            return
        if not last.has_ended:
            store.commit(
                "ppo-state",
                run.name,
                {file: store.read_bytes(last, file) for file in (STATE, SAMPLES)},
                version=last.version + 1,
                parents=last.parents,
                config=last.config,
                metrics={**last.metrics, ENDED: True},
                source_digest=last.source_digest,
                flow_run=run.flow_run,
            )
        store.prune("ppo-state", run.name, keep=1)
    except InfraError as error:  # the policy is stored; collect deletes what is left
        run_logger().warning("training states of %s are still there: %s", run.name, error)


def _episode_name(episode: int, episodes: int) -> str:
    """Return what an episode is called, as a task and in the log."""
    return f"episode {ordinal(episode)}/{episodes}"


def _task_name(parameters: dict[str, Any]) -> str:
    return _episode_name(parameters["episode"], parameters["run"].config.ppo.episodes)


@stage_task(name="episode", task_run_name=_task_name)
def ppo_episode(run: PPORun, episode: int) -> EpisodeResult | None:
    """Run one episode, and any before it whose state was lost, and return its figures.

    Its state is committed beside the next episode, which ends by waiting for that before it commits its own. Nothing is
    run, and None returned, if another flow run of the same name has stored its policy meanwhile.
    """
    from rlhf_core.ray_tools.calls import ask, follow
    from tasks.ppo_group import ANSWER_S, peers_of, trainer_for

    context = open_context()
    leave_if_taken_over()
    if finished_policy(run, reused=True):
        return None
    config = run.config.ppo
    with _EndingTheGroupOnFailure(run) as attempt:
        trainer = trainer_for(run, episode, context)
        attempt.note_bases(context)
        peers = peers_of(run)
        position = ask(trainer.position, ANSWER_S)
        record = position.last  # an attempt that ended after its commit leaves nothing to run
        for due in range(position.next_episode, episode + 1):
            running = trainer.run_episode.remote(due)
            limit_s = config.cluster.episode_timeout_s
            record = follow(running, trainer.progress, limit_s, tell=_log_progress, members=peers)
            _say_episode(record, config.episodes)
        stops = ask(trainer.position, ANSWER_S).stops
        if episode + 1 == config.episodes or stops is not None:
            ask(trainer.await_commit, config.cluster.commit_timeout_s + ANSWER_S)
    return EpisodeResult(
        run=run.name,
        episode=record.episode,
        policy_version=record.policy_version,
        incarnation=record.incarnation,
        row=record.as_row(),
        stops=stops,
    )


@stage_task(name="publish-policy")
def publish_policy(run: PPORun, episodes: int | None = None, *, is_over: bool = True) -> StageResult:
    """Store the policy, from the trainer that holds it, and return its reference.

    Args:
        run: of PPO.
        episodes: that are done; None: all.
        is_over: whether no later night goes on.
    """
    from rlhf_core.ray_tools.calls import ask, follow
    from tasks.ppo_group import ANSWER_S, peers_of, trainer_for

    context = open_context()
    leave_if_taken_over()
    night = None if is_over else episodes
    if done := finished_policy(run, reused=False, episodes=night):  # by an attempt that did not learn of it
        return done
    config = run.config.ppo
    with _EndingTheGroupOnFailure(run) as attempt:
        trainer = trainer_for(run, config.episodes if episodes is None else episodes, context)
        attempt.note_bases(context)
        ask(trainer.await_commit, config.cluster.commit_timeout_s + ANSWER_S)  # a night ends at a commit
        storing = trainer.commit_policy.remote()
        limit_s = config.cluster.commit_timeout_s
        follow(storing, trainer.progress, limit_s, tell=_log_progress, members=peers_of(run))
    result = finished_policy(run, reused=False, episodes=night)
    if result is None:
        raise RlhfError(
            f"the policy of run {run.name} was stored, but is not found under its key; is the store's index intact?"
        )
    say("ppo", f"policy stored as {result.uri}{_kept(result)}")
    _tell_of_high_rank(context.store, result.uri)
    return result


def _kept(policy: StageResult) -> str:
    metrics = policy.metrics
    if KEPT not in metrics:
        return ""
    figure = f"{metrics[DEVELOPMENT]:.3f} on the development split"
    return f": episode {metrics[KEPT]} of {metrics['episodes']} is kept, with {figure}"


@only_shows("the rank of the policy's adapters", deadline_s=DEADLINE_S)
def _tell_of_high_rank(store: ArtifactStore, uri: str) -> None:
    """Say how to begin from one whole model, where the policy's adapters and those below have a high rank together."""
    policy = store.resolve(uri)
    files = [each.path for each in policy.files if each.path.rpartition("/")[2] == "adapter_config.json"]
    rank = sum(store.read_json(policy, file)["r"] for file in files)
    if rank >= HIGH_RANK:
        say(
            "ppo",
            f"its adapters have rank {rank} in all, and every pass computes them; to begin from one whole model: "
            f"rlhf artifacts fetch {uri} DIR --merged, then -p model=DIR without -p actor",
        )


class _EndingTheGroupOnFailure:
    """Ends the actors when an attempt fails, so that the next one restores committed state and nothing else."""

    def __init__(self, run: PPORun) -> None:
        self._run = run
        self._bases: list[Base] = []

    def note_bases(self, context: Context) -> None:
        """Note what the actors map: one whose file is cut off dies, and says nothing."""
        from rlhf_core.models.base import copies_of

        if self._run.base is not None and self._run.shares_base:
            self._bases = copies_of(self._run.base.digest, context.settings.models_dir)

    def __enter__(self) -> _EndingTheGroupOnFailure:
        """Begin the attempt."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """End the group if the attempt failed; a cancelled run's cluster ends as a whole.

        Raises:
            BaseChangedError: in place of what a process died of.
        """
        import ray

        from infra.clusters import is_lost
        from tasks.failures import first_line, has_died, passes
        from tasks.ppo_group import end_group

        if not isinstance(error, Exception):
            return
        if passes(error):
            run_logger().warning("the actors of %s are ended: %s", self._run.name, first_line(error))
        if ray.is_initialized() and not is_lost(self._run.name):  # with all its actors; the next attempt starts another
            try:
                end_group(self._run)
            except (ray.exceptions.RayError, InfraError, RlhfError, RuntimeError, OSError) as trouble:
                run_logger().warning("the trainer group of %s could not be ended: %s", self._run.name, trouble)
        if has_died(error):
            for base in self._bases:
                base.check_unchanged()


def _log_progress(doing: str) -> None:
    run_logger().debug("%s", doing)


@only_shows("a line of progress")
def _say_episode(record: EpisodeRecord, episodes: int) -> None:
    took = sum(record.seconds.values())
    left = (episodes - record.episode - 1) * took
    metrics = record.metrics
    verified = f"verifier {metrics['verifier']:.3f}  " if "raw/verifier" in metrics else ""
    figures = f"score {metrics['score']:.3f}  {verified}KL {metrics['kl']:z.4f}"
    if abstained := metrics.get("abstained"):
        figures += f"  {abstained:.0%} abstained"
    if revivals := int(record.rollouts.get("revivals", 0)):
        figures += f"  {revivals} revived"
    time = f"{duration(left)} left in this stage" if left else f"the last one took {duration(took)}"
    say("ppo", f"{_episode_name(record.episode, episodes)}  {figures}  length {metrics['length']:.1f}  {time}")

"""PPO as a flow of its own: a loop over episodes, one task each, on the run's own Ray cluster."""

from prefect import flow

from flows.begin import begin
from flows.end import ends_without_news, finished, made
from flows.presets.form import Episodes, Overrides, Preset, Seed
from tasks.clusters import end_cluster
from tasks.context import is_alone
from tasks.forecast import foretell
from tasks.one_process import one_process
from tasks.ppo import (
    delete_states,
    ends_before,
    finished_policy,
    next_episode,
    plan_ppo,
    ppo_episode,
    publish_policy,
)
from tasks.report.write import show_episodes
from tasks.results import StageResult
from tasks.task_errors import in_one_sentence
from tasks.trackers import track_ppo, with_trackers


@flow(name="ppo", persist_result=False)
@in_one_sentence
@one_process
@with_trackers
@ends_without_news()
def ppo(
    preset: Preset = "quickstart",
    model: str | None = None,
    actor: str | None = None,
    reward_model: str | None = None,
    data: str | None = None,
    episodes: Episodes | None = None,
    seed: Seed | None = None,
    overrides: Overrides | None = None,
    name: str | None = None,
) -> StageResult | None:
    """Improve a policy with PPO; goes on from the last committed episode of the same configuration and inputs.

    Returns the policy; None if the night's budget was spent before the first episode.

    Args:
        preset: name of a preset.
        model: base model: packaged name, directory, or hub name (`org/name@revision`).
        actor: policy to start from; default: the latest SFT model of the project.
        reward_model: reward model; default: the latest of the project, where the preset gives it weight.
        data: a set by path, pattern, `s3://` address or hub name, or a `dataset/...` reference.
        episodes: number of episodes.
        seed: seed of everything random.
        overrides: configuration by section, or by dotted key such as `ppo.lr`; what is not given stays the preset's.
        name: the project, after which artifacts are named; default: made from preset and data.
    """
    config, dataset, actor, reward_model = begin(
        preset,
        data,
        name=name,
        trains="ppo",
        reads=("ppo",),
        actor=actor,
        reward_model=reward_model,
        model=model,
        episodes=episodes,
        seed=seed,
        overrides=overrides,
    )
    if is_alone():
        foretell(config)
    run = plan_ppo(config, actor, reward_model, dataset.parent)
    policy, ended = finished_policy(run, reused=True), None
    if policy is None:
        due, last = next_episode(run), None
        try:
            while due < config.ppo.episodes and (ended := ends_before(run, due, last)) is None:
                last = ppo_episode(run, due)
                track_ppo(run)
                due += 1
            if ended is not None and not due:
                return finished(None, ended.why, see=run.actor.uri)
            policy = publish_policy(run, due, is_over=ended is None or ended.is_over)
            if ended is None or ended.is_over:
                delete_states(run)  # while no other run can have the cluster, and build from them
        finally:
            end_cluster(run.name)
    else:
        delete_states(run)  # of a run that was killed between the two
    show_episodes(policy, config.seed)
    track_ppo(run, policy)
    return finished(policy, f"{made(policy)}; {ended.why}" if ended else made(policy), see=policy.uri)

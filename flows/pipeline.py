"""The whole night: data -> SFT -> reward model -> PPO -> evaluation -> gate -> promotion. Read this first."""

import time
from typing import Any

from prefect import flow

from flows.approval import Night, as_approved, check_can_ask, night_that_waited
from flows.begin import begin
from flows.end import ends_without_news, finished, unfinished
from flows.evaluate import evaluate
from flows.ppo import ppo
from flows.presets.form import Episodes, Overrides, Preset, Seed
from flows.reward_model import reward_model as train_reward_model
from flows.sft import sft
from tasks.arrivals import count_as_learnt, write_nothing_new
from tasks.data import SPLITS
from tasks.error_budget import tell_power
from tasks.events import tell_verdict
from tasks.forecast import foretell
from tasks.one_process import one_process
from tasks.parents import wants_reward_model
from tasks.progress import with_lines_of_stages
from tasks.promote import gate, promote
from tasks.report.write import write_budget_spent, write_report
from tasks.results import Decision
from tasks.task_errors import in_one_sentence
from tasks.trackers import track_report, with_trackers


@flow(name="pipeline", persist_result=False)
@in_one_sentence
@one_process
@with_trackers
@with_lines_of_stages
@ends_without_news(write_nothing_new)
def pipeline(
    preset: Preset = "quickstart",
    model: str | None = None,
    actor: str | None = None,
    reward_model: str | None = None,
    data: str | None = None,
    episodes: Episodes | None = None,
    seed: Seed | None = None,
    overrides: Overrides | None = None,
    name: str | None = None,
    as_of: str | None = None,
) -> Decision | None:
    """Turn a base model, problems and preferences into an aligned model, and promote it if it is better.

    Where data arrive (`data.arrivals`) and there is nothing new to learn, it ends at once. Where a person is to approve
    (`gate.approval`), it is suspended before a promotion, and goes on from there.

    Args:
        preset: name of a preset.
        model: base model: packaged name, directory, or hub name (`org/name@revision`).
        actor: SFT model to use instead of training one.
        reward_model: reward model to use instead of training one.
        data: a set by path, pattern, `s3://` address or hub name, or a `dataset/...` reference.
        episodes: number of PPO episodes.
        seed: seed of everything random.
        overrides: configuration by section, or by dotted key such as `ppo.lr`; what is not given stays the preset's.
        name: the project, after which artifacts are named; default: made from preset and data.
        as_of: where data arrive, a day such as 2026-11-27: what had arrived by its end; default: all that has.
    """
    started = time.monotonic()
    if (night := night_that_waited()) is not None:
        return _concluded(night, began=started - night.worked_s)
    config, dataset, actor, reward_model = begin(
        preset,
        data,
        name=name,
        trains="ppo",
        reads=SPLITS,
        actor=actor,
        reward_model=reward_model,
        as_of=as_of,
        model=model,
        episodes=episodes,
        seed=seed,
        overrides=overrides,
    )
    check_can_ask(config)
    tell_power(config, dataset)
    common: dict[str, Any] = {
        "preset": preset,
        "name": config.name,
        "model": model,
        "data": dataset.uri,
        "seed": seed,
        "overrides": overrides,
    }
    foretell(config, sft=actor is None, reward_model=reward_model is None, evaluation=True)
    stages = [dataset]
    if actor is None:
        stages.append(sft(**common))
        actor = stages[-1].uri
    if reward_model is None and wants_reward_model(config):
        pairs, scorer = train_reward_model(actor=actor, **common)
        stages += [scorer] if pairs.uri == dataset.uri else [pairs, scorer]
        reward_model = scorer.uri
    policy = ppo(actor=actor, reward_model=reward_model, episodes=episodes, **common)
    if policy is None:
        told = "the night's budget was spent before PPO's first episode; the next run with the same data goes on"
        see = write_budget_spent(config, stages, told, wall_s=time.monotonic() - started)
        track_report(see)
        return finished(None, told, see=see)
    evaluations = evaluate(actor=policy.uri, reward_model=reward_model, **common)
    decision = gate(config, evaluations)
    worked_s = time.monotonic() - started
    night = Night(config, [*stages, policy], evaluations, decision, reward_model, worked_s)
    return _concluded(night, began=started)


def _concluded(night: Night, began: float) -> Decision | None:
    """Promote as the gate decided, and as a person approved where one is asked; report, and tell others."""
    night = as_approved(night)
    config, policy, decision = night.config, night.stages[-1], night.decision
    champion = promote(decision)
    if not unfinished(policy):  # the next run goes on with the same data
        count_as_learnt(config, night.stages[0])
    wall_s = time.monotonic() - began
    report = write_report(config, night.stages, night.evaluations, decision, champion, wall_s=wall_s)
    tell_verdict(config.name, decision, champion=champion, report=report)
    track_report(report)
    told = f"{'promoted' if decision.promote else 'not promoted'}: {decision.reason}{unfinished(policy)}"
    return finished(decision, told, see=report)

"""Reward-model training as a flow of its own."""

from prefect import flow

from flows.begin import begin
from flows.end import ends_without_news, finished, made
from flows.presets.form import Overrides, Preset, Seed
from tasks.one_process import one_process
from tasks.parents import find_policy
from tasks.preferences import collect_preferences
from tasks.report.write import show_training
from tasks.results import StageResult
from tasks.supervised import train_reward_model
from tasks.task_errors import in_one_sentence
from tasks.trackers import track, with_trackers


@flow(name="reward-model", persist_result=False)
@in_one_sentence
@one_process
@with_trackers
@ends_without_news()
def reward_model(
    preset: Preset = "quickstart",
    model: str | None = None,
    actor: str | None = None,
    data: str | None = None,
    seed: Seed | None = None,
    overrides: Overrides | None = None,
    name: str | None = None,
) -> list[StageResult]:
    """Return preference pairs (a file's, or the SFT model's own samples ordered by the verifier) and a reward model.

    Args:
        preset: name of a preset.
        model: base model: packaged name, directory, or hub name (`org/name@revision`).
        actor: SFT model whose trunk it starts from; default: the latest of the project.
        data: a set by path, pattern, `s3://` address or hub name, or a `dataset/...` reference.
        seed: seed of everything random.
        overrides: configuration by section, or by dotted key such as `ppo.lr`; what is not given stays the preset's.
        name: the project, after which artifacts are named; default: made from preset and data.
    """
    config, dataset, actor, _ = begin(
        preset,
        data,
        name=name,
        trains="reward-model",
        reads=(),
        actor=actor,
        model=model,
        seed=seed,
        overrides=overrides,
    )
    policy = find_policy(config, actor)
    pairs = collect_preferences(config, dataset.parent, policy)
    scorer = train_reward_model(config, pairs.parent, policy)
    show_training(scorer)
    track(scorer)
    return finished([pairs, scorer], made(pairs, scorer), see=scorer.uri)

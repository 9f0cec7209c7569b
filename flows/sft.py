"""Supervised fine-tuning as a flow of its own."""

from prefect import flow

from flows.begin import begin
from flows.end import ends_without_news, finished, made
from flows.presets.form import Overrides, Preset, Seed
from tasks.one_process import one_process
from tasks.report.write import show_training
from tasks.results import StageResult
from tasks.supervised import train_sft
from tasks.task_errors import in_one_sentence
from tasks.trackers import track, with_trackers


@flow(name="sft", persist_result=False)
@in_one_sentence
@one_process
@with_trackers
@ends_without_news()
def sft(
    preset: Preset = "quickstart",
    model: str | None = None,
    actor: str | None = None,
    data: str | None = None,
    seed: Seed | None = None,
    overrides: Overrides | None = None,
    name: str | None = None,
) -> StageResult:
    """Fine-tune the base model, or go on from another, on demonstrations.

    Args:
        preset: name of a preset.
        model: base model: packaged name, directory, or hub name (`org/name@revision`).
        actor: SFT model or policy to go on from, such as `sft/quickstart@1`; default: the base model.
        data: a set by path, pattern, `s3://` address or hub name, or a `dataset/...` reference.
        seed: seed of everything random.
        overrides: configuration by section, or by dotted key such as `ppo.lr`; what is not given stays the preset's.
        name: the project, after which artifacts are named; default: made from preset and data.
    """
    config, dataset, actor, _ = begin(
        preset, data, name=name, trains="sft", reads=("sft",), actor=actor, model=model, seed=seed, overrides=overrides
    )
    trained = train_sft(config, dataset.parent, actor)
    show_training(trained)
    track(trained)
    return finished(trained, made(trained), see=trained.uri)

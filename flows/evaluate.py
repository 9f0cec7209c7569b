"""Evaluation as a flow of its own: base, SFT, PPO and champion on the same held-out problems."""

from prefect import flow

from flows.begin import begin
from flows.end import ends_without_news, finished, made
from flows.presets.form import Overrides, Preset, Seed
from tasks.evaluate import contestants, evaluate_policy, find_judge
from tasks.one_process import one_process
from tasks.report.write import show_evaluations
from tasks.results import StageResult
from tasks.task_errors import in_one_sentence
from tasks.trackers import track, with_trackers


@flow(name="evaluate", persist_result=False)
@in_one_sentence
@one_process
@with_trackers
@ends_without_news()
def evaluate(
    preset: Preset = "quickstart",
    model: str | None = None,
    actor: str | None = None,
    reward_model: str | None = None,
    data: str | None = None,
    seed: Seed | None = None,
    overrides: Overrides | None = None,
    name: str | None = None,
) -> dict[str, StageResult]:
    """Evaluate a policy, and beside it what PPO started from, the base model, and the champion.

    Args:
        preset: name of a preset.
        model: base model: packaged name, directory, or hub name (`org/name@revision`).
        actor: policy to evaluate; default: the latest of the project.
        reward_model: scores the answers where `evaluation.judge` is `reward_model`; default: the latest of the project.
        data: a set by path, pattern, `s3://` address or hub name, or a `dataset/...` reference.
        seed: seed of the problems.
        overrides: configuration by section, or by dotted key such as `ppo.lr`; what is not given stays the preset's.
        name: the project, after which artifacts are named; default: made from preset and data.
    """
    config, dataset, actor, reward_model = begin(
        preset,
        data,
        name=name,
        trains=None,
        reads=("evaluation",),
        actor=actor,
        reward_model=reward_model,
        model=model,
        seed=seed,
        overrides=overrides,
    )
    judge = find_judge(config, reward_model)
    policies = contestants(config, actor)
    new = policies["ppo"]
    found = {role: evaluate_policy(config, each, dataset.parent, judge, beside=new) for role, each in policies.items()}
    show_evaluations(found, config.seed)
    track(*found.values())
    return finished(found, made(*found.values()), see=found["ppo"].uri)

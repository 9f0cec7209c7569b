"""How every flow begins: parameters to configuration, what can be refused at once, the dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from flows.presets import Draft, draft_of, preset_values
from infra.errors import ReferenceNotFoundError
from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ConfigError
from tasks.arrivals import NothingNew, NothingNewError, look_for_arrivals
from tasks.context import Context, open_context
from tasks.data import SPLITS, check_data, check_rows_fit, is_dataset, prepare_data, settle_dataset, settled, with_data
from tasks.events import note_project
from tasks.nights import check_data_are_named, tags_of_run
from tasks.parents import wants_reward_model
from tasks.plan import recalled, recorded, settled_once, told_at
from tasks.preflight import Trained, preflight, settle_models
from tasks.progress import say
from tasks.projects import in_project, told_project
from tasks.results import StageResult

BEGAN_WITH = "began with"


class Begun(NamedTuple):
    """What the stages of a flow work with."""

    config: PipelineConfig
    dataset: StageResult
    actor: str | None
    """By version; None: it is trained here, or is the preset's base model."""
    reward_model: str | None
    """By version; None: it is trained here, or none is asked."""


def begin(
    preset: str,
    data: str | None,
    *,
    name: str | None = None,
    trains: Literal["ppo", "sft", "reward-model"] | None,
    reads: tuple[str, ...],
    actor: str | None = None,
    reward_model: str | None = None,
    as_of: str | None = None,
    **parameters: Any,
) -> Begun:
    """Resolve a flow's parameters and refuse, before anything expensive, what is bound to fail.

    A run that is started again goes on with what it resolved when it first began (`tasks.plan`).

    Args:
        preset: name of a preset.
        data: a set by path, glob, `s3://` address or hub name, a `dataset/...` reference, or None: the preset's data.
        name: the project; None makes one from preset and data.
        trains: the largest stage that is trained; its models must fit on this machine.
        reads: splits of the dataset that the flow reads.
        actor: policy that was named.
        reward_model: reward model that was named.
        as_of: where data arrive, the day up to which they are taken; None takes all that has arrived.
        parameters: the other parameters of `flows.presets.draft_of`.

    Raises:
        NothingNewError: data arrive, and nothing to learn has.
        RlhfError: a parameter, file, model or machine is not as it should be.
        InfraError: the store cannot be used, or a reference names nothing.
    """
    context = open_context()
    given: dict[str, Any] = {"actor": actor, "reward_model": reward_model}
    begun: Begun | None = recalled(context, BEGAN_WITH, Begun)
    if begun is not None:
        note_project(begun.config.name)
        _say_as_it_began(context, preset, begun)
        stages = _training(begun.config, trains, reads, **given)
        settle_models(begun.config, trains=trains, stages=stages, **given)  # they must be there as they were
        preflight(begun.config, trains=trains, stages=stages, actor=begun.actor, reward_model=begun.reward_model)
        return begun
    data = settle_dataset(context, data)
    before = recalled(context, _question(preset), dict[str, Any], by_all=True)
    values = before or preset_values(preset)
    draft = _draft(context, preset, data, values, {"name": name, "goes_on": before is not None, **parameters})
    note_project(draft.config.name)
    if not is_dataset(data):
        look_for_arrivals(context, draft.config, as_of, learns=trains is not None)
    stages = _training(draft.config, trains, reads, **given)
    config = preflight(draft.config, trains=trains, stages=stages, **given)
    draft = draft._replace(config=config)
    # Only from here on: a mistake in the preset, which was refused above, can be corrected and the run tried again.
    recorded(context, _question(preset), dict[str, Any], values, by_all=True)
    _say_project(context, config)
    if not is_dataset(data):  # of a stored one nothing can change; of files, what their rows are for is seen in them
        config = recorded(context, "draft", Draft, draft).config
    missing: ConfigError | ReferenceNotFoundError | None = None
    try:
        models = settle_models(config, trains=trains, stages=stages, **given)
    except (ConfigError, ReferenceNotFoundError) as error:  # an earlier stage's: first, what is wrong with the data
        missing = error
    needed = _needed(config, trains, reads, **given)
    dataset = prepare_data(config, data, reads=needed, sizes=draft.sizes, as_of=as_of)
    if isinstance(dataset, NothingNew):
        raise NothingNewError(config, dataset)
    if dataset.reused:  # what was just made was checked before it was stored
        check_data(config, dataset.parent, reads=needed)
    if missing is not None:
        raise missing
    begun = Begun(settled(config, draft.sizes, dataset, data, reads=needed), dataset, *models)
    if stages:
        check_rows_fit(begun.config, dataset.parent, stages)
    return recorded(context, BEGAN_WITH, Begun, begun)


def _question(preset: str) -> str:
    """Return what a run asks for once, for all its flows: a preset that is edited meanwhile counts for the next run."""
    return f"preset {preset}"


def _draft(
    context: Context, preset: str, data: str | None, values: dict[str, Any], parameters: Mapping[str, Any]
) -> Draft:
    """Return the configuration before the data are read, as it was when the run began."""
    before: Draft | None = None if is_dataset(data) else recalled(context, "draft", Draft)
    if before is not None:
        return before
    draft = draft_of(preset, data=data, values=values, **parameters)
    check_data_are_named(tags_of_run(), draft.config, data)
    return draft._replace(config=with_data_and_project(draft.config, data, values, parameters))


def with_data_and_project(
    config: PipelineConfig, data: str | None, values: Mapping[str, Any], parameters: Mapping[str, Any]
) -> PipelineConfig:
    """Return a drafted configuration with a run's data in it, and the name of its project.

    Args:
        config: of `flows.presets.draft_of`.
        data: the parameter.
        values: what the preset's file says.
        parameters: of the run; `name`, and an override of it, name the project.
    """
    named = parameters.get("name") is not None or "name" in (parameters.get("overrides") or {})

    def project(config: PipelineConfig) -> PipelineConfig:
        return in_project(config, values, named=named)

    return project(with_data(config, data, lambda config: project(config).name))


def _say_project(context: Context, config: PipelineConfig) -> None:
    """Say which project a run is of, once for all its flows."""

    def told() -> str:
        say("project", told_project(config))
        return config.name

    settled_once(context, f"project {config.name}", str, told, by_all=True)


def _say_as_it_began(context: Context, preset: str, begun: Begun) -> None:
    models = [
        f"{name} {found}" for name, found in (("actor", begun.actor), ("reward model", begun.reward_model)) if found
    ]
    when = told_at(context, BEGAN_WITH)
    say("data", f"goes on as it began ({when:%Y-%m-%d %H:%M} UTC): {', '.join([begun.dataset.uri, *models])}")
    try:
        is_edited = preset_values(preset) != recalled(context, _question(preset), dict[str, Any], by_all=True)
    except ConfigError:
        is_edited = True
    if is_edited:
        say("data", f"the preset {preset} was edited since: that counts for new runs, not for this one")


def _training(
    config: PipelineConfig,
    trains: str | None,
    reads: tuple[str, ...],
    *,
    actor: str | None,
    reward_model: str | None,
) -> tuple[Trained, ...]:
    """Return the stages that this very run trains: one that reads their data, unless their models were named."""
    if trains != "ppo":
        alone: dict[str | None, tuple[Trained, ...]] = {"sft": ("sft",), "reward-model": ("reward_model",)}
        return alone.get(trains, ())
    stages: list[Trained] = ["ppo"]
    if "preferences" in reads and reward_model is None and wants_reward_model(config):
        stages.insert(0, "reward_model")
    if "sft" in reads and actor is None:
        stages.insert(0, "sft")
    return tuple(stages)


def _needed(
    config: PipelineConfig,
    trains: str | None,
    reads: tuple[str, ...],
    *,
    actor: str | None,
    reward_model: str | None,
) -> tuple[str, ...]:
    """Return the splits that this very run reads: models that are there already need no data."""
    needed = set(reads)
    if trains == "reward-model":
        needed.add("preferences")  # pairs, or prompts to sample them for
    if trains == "ppo":
        if actor is not None:
            needed.discard("sft")
        if config.ppo.ptx_coef > 0:
            needed.add("sft")  # demonstrations are learnt beside PPO
        if reward_model is not None or not wants_reward_model(config):
            needed.discard("preferences")
    return tuple(split for split in SPLITS if split in needed)

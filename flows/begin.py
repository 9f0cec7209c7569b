"""How every flow begins: parameters to configuration, what can be refused at once, the dataset."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from flows.presets import draft_of, preset_values
from rlhf_core.config import PipelineConfig
from tasks.context import open_context
from tasks.data import SPLITS, check_data, prepare_data, settled, with_data
from tasks.parents import wants_reward_model
from tasks.plan import recalled, recorded
from tasks.preflight import Trained, preflight
from tasks.progress import say
from tasks.results import StageResult


class Begun(NamedTuple):
    """What the stages of a flow work with."""

    config: PipelineConfig
    dataset: StageResult


def begin(
    preset: str,
    data: str | None,
    *,
    trains: Literal["ppo", "sft", "reward-model"] | None,
    reads: tuple[str, ...],
    actor: str | None = None,
    reward_model: str | None = None,
    **parameters: Any,
) -> Begun:
    """Resolve a flow's parameters and refuse, before anything expensive, what could not end well.

    A run that is started again goes on with what it resolved when it first began (`tasks.plan`).

    Args:
        preset: name of a preset.
        data: a set by path, glob, `s3://` address or hub name, a `dataset/...` reference, or None: the preset's data.
        trains: the largest stage that is trained; its models must fit on this machine.
        reads: splits of the dataset that the flow reads.
        actor: policy that was named.
        reward_model: reward model that was named.
        parameters: the other parameters of `flows.presets.draft_of`.

    Raises:
        RlhfError: a parameter, file, model or machine is not as it should be.
        InfraError: the store cannot be used, or a reference names nothing.
    """
    context = open_context()
    begun: Begun | None = recalled(context, "began with", Begun)
    if begun is not None:
        say("data", f"this run began before: it goes on with {begun.dataset.uri} and all else that it began with")
        config = begun.config
    else:
        values = recalled(context, f"preset {preset}", dict[str, Any], by_all=True) or preset_values(preset)
        draft = draft_of(preset, data=data, values=values, **parameters)
        recorded(context, f"preset {preset}", dict[str, Any], values, by_all=True)
        config = with_data(draft.config, data)
    stages = _training(config, trains, reads, actor=actor, reward_model=reward_model)
    preflight(config, trains=trains, stages=stages, actor=actor, reward_model=reward_model)
    if begun is not None:
        return begun
    needed = _needed(config, trains, reads, actor=actor, reward_model=reward_model)
    dataset = prepare_data(config, data, reads=needed, sizes=draft.sizes)
    if dataset.reused:  # what was just made was checked before it was stored
        check_data(config, dataset.parent, reads=needed)
    begun = Begun(settled(config, draft.sizes, dataset, data, reads=needed), dataset)
    return recorded(context, "began with", Begun, begun)


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

"""What a checkpoint of `PPOTrainer` holds besides models, optimizers and schedules, and how it comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlhf_core.counting import counted
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.training.checkpoint import Checkpoint, check_training_form, write_json
from rlhf_core.training.run_directory import TRAINER
from rlhf_core.training.state import prefixed, under
from rlhf_core.types import Experience

STATE = "state.json"
_COLLECTED, _LEARNT = "collected", "learnt"


class Learning(NamedTuple):
    """What an episode is learnt from."""

    collected: Experience
    """The buffer's rows, in their order."""
    learnt: Experience
    """The same as the learner restated them before its first step."""


class RankState(NamedTuple):
    """What differs between ranks."""

    facts: dict[str, Any]
    """Where each loader stands, by its name."""
    tensors: dict[str, Tensor]
    """Random states, of now and of each loader's pass, by `<whose>.<which>`."""
    learning: Learning | None
    """None between two episodes."""


class TrainerState(NamedTuple):
    """What is the same on all ranks, as JSON holds it."""

    position: dict[str, int]
    world_size: int
    shapes: dict[str, dict[str, list[int]]]
    """Of every weight, by model."""
    controls: dict[str, Any]
    learner: dict[str, Any]
    meter: dict[str, list[float]]
    forms: dict[str, dict[str, Any]]
    """Of optimizer and schedule, by model, as `training_form` gives them."""
    settings: dict[str, Any]
    """What decides the minibatches: an episode cannot be gone on with under others."""


def write_state(directory: Path, state: TrainerState, own: RankState, ranks: Ranks) -> None:
    """Write the common state from the first rank, and each rank's own."""
    if ranks.is_first:
        write_json(directory / STATE, state._asdict())
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in own.tensors.items()}
    if own.learning is not None:
        collected, learnt = (_on_cpu(experience) for experience in own.learning)
        restated = {name: tensor for name, tensor in learnt.items() if not torch.equal(tensor, collected[name])}
        tensors |= prefixed(_COLLECTED, collected) | prefixed(_LEARNT, restated)
    save_file(tensors, directory / f"rank-{ranks.rank}.safetensors")
    write_json(directory / f"rank-{ranks.rank}.json", own.facts)


def read_state(checkpoint: Checkpoint) -> TrainerState:
    """Return the common state.

    Raises:
        ModelError: if it is of another form.
    """
    path = checkpoint.path(TRAINER) / STATE
    try:
        return TrainerState(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{path} is no state of a PPO trainer ({error}); give a checkpoint that fit wrote") from error


def read_rank_facts(checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """Return where a rank's loaders stood."""
    facts: dict[str, Any] = json.loads((checkpoint.path(TRAINER) / f"rank-{rank}.json").read_text())
    return facts


def read_rank_state(checkpoint: Checkpoint, rank: int) -> RankState:
    """Return what a rank wrote."""
    tensors = load_file(checkpoint.path(TRAINER) / f"rank-{rank}.safetensors")
    learning = _learning(under(_COLLECTED, tensors), under(_LEARNT, tensors))
    return RankState(read_rank_facts(checkpoint, rank), tensors, learning)


def check_state(state: TrainerState, checkpoint: Checkpoint, own: TrainerState) -> None:
    """See that a stored state fits this trainer, before anything is changed.

    Args:
        state: from the checkpoint.
        checkpoint: where it was found.
        own: this trainer's state now.

    Raises:
        ModelError: if the models have other weights, or optimizers or schedules are of another form.
        ConfigError: if the middle of an episode is to be gone on with under other settings.
    """
    for role, shapes in own.shapes.items():
        stored = state.shapes.get(role, {})
        wrong = sorted(name for name in shapes.keys() | stored.keys() if shapes.get(name) != stored.get(name))
        if wrong:
            name = wrong[0]
            raise ModelError(
                f"the checkpoint {checkpoint.path(role)} does not fit the {role}: they disagree on "
                f"{counted(len(wrong), 'weight')} (missing, unknown or of another shape), such as {name} "
                f"({stored.get(name)} there, {shapes.get(name)} here); build the models as the run did that wrote it"
            )
    for role, form in own.forms.items():
        check_training_form(state.forms.get(role, {}), form, where=checkpoint.path(role))
    changed = sorted(name for name, value in state.settings.items() if own.settings.get(name) != value)
    # Other ranks do not go on with the middle of an episode, but with the next one.
    if changed and state.position["windows"] and state.world_size == own.world_size:
        name = changed[0]
        raise ConfigError(
            f"the checkpoint {checkpoint.name} is from mid-episode with {name} {state.settings[name]}, but "
            f"this trainer has {own.settings.get(name)}; go on with the same settings, or from the end of an episode"
        )


def weight_shapes(model: nn.Module) -> dict[str, list[int]]:
    """Return the shape of every weight by its name, as JSON holds it."""
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def _on_cpu(experience: Experience) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in experience.tensors().items()}


def _learning(collected: dict[str, Tensor], restated: dict[str, Tensor]) -> Learning | None:
    if not collected:
        return None
    fields: dict[str, Any] = {"returns": None, **collected}
    experience = Experience(**fields)
    return Learning(experience, experience.replace(**restated))

"""The checkpoints of one `PPOTrainer`: what is written, when they are due, and how they are put back."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlhf_core.counting import counted, ordinal
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.ppo.controls import RewardControls
from rlhf_core.ppo.episode import Learning, Position
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.strategy.ranks import Ranks, together
from rlhf_core.training.boosted import plain_model
from rlhf_core.training.checkpoint import (
    Checkpoint,
    SaveDir,
    check_training_form,
    find_checkpoint,
    training_form,
    write_json,
)
from rlhf_core.training.loaders import CycledLoader, LoaderProgress, progress_of_all
from rlhf_core.training.modes import random_states, set_random_states
from rlhf_core.training.optim import Trained
from rlhf_core.training.run_directory import TRAINER, checkpoint_name
from rlhf_core.training.state import prefixed, under
from rlhf_core.training.tracking import MeanMeter
from rlhf_core.types import Experience

STATE = "state.json"
_COLLECTED, _LEARNT = "collected", "learnt"


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


logger = logging.getLogger(__name__)

_RANDOM = "random"


class Held(NamedTuple):
    """What a trainer holds besides its models."""

    learner: PPOLearner
    controls: RewardControls
    meter: MeanMeter


class Restored(NamedTuple):
    """What waits for the loaders of a fit."""

    own: RankState
    """This rank's; the first's where it had none."""
    dealt: dict[str, LoaderProgress]
    """By loader, where another number of ranks goes on than wrote it."""
    is_fresh: bool
    """Whether this rank had none, and keeps its random states."""


class PPOCheckpoints:
    """Writes and reads the checkpoints of one run; every method is called by all ranks.

    Args:
        save_dir: None writes none.
        interval: optimizer steps between two; 0 leaves it to the end of the fit.
        roles: the trained models by name.
        held: what else is written and put back.
        settings: what decides the minibatches of an episode.
        ranks: who trains together.
    """

    def __init__(
        self,
        save_dir: Path | None,
        interval: int,
        roles: Mapping[str, Trained],
        held: Held,
        *,
        settings: dict[str, Any],
        ranks: Ranks,
    ) -> None:
        if interval < 0 or (interval and save_dir is None):
            raise ConfigError(f"save_interval is {interval}; it must be 0, or above 0 with a save_dir")
        self._save_dir, self._interval = SaveDir(save_dir, ranks), interval
        self._roles, self._held, self._settings, self._ranks = dict(roles), held, settings, ranks
        self._restored: Restored | None = None

    def prepare(self) -> None:
        """See, before a fit, that checkpoints can be written, and not among those of another run.

        Raises:
            ConfigError: otherwise.
        """
        self._save_dir.prepare()

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after this optimizer step."""
        return self._interval > 0 and step % self._interval == 0

    def save(self, position: Position, loaders: Mapping[str, CycledLoader], learning: Learning | None = None) -> None:
        """Write a checkpoint, unless there is one of this step or nowhere to write.

        Raises:
            TrainingError: if it could not be written; earlier ones are as they were.
        """
        if self._save_dir.holds(position.step):
            return
        episode = position.episode if position.windows else position.episode - 1  # the one last learnt from
        state, own = self._state(position), _rank_state(loaders, learning)
        facts = {"epoch": episode, "step": position.step, "sample_start_index": loaders["prompts"].samples_given}
        writers: dict[str, Callable[[Path], None]] = {
            role: lambda directory, trained=trained: self._write_model(directory, trained, facts)  # type: ignore[misc]
            for role, trained in self._roles.items()
        }
        writers[TRAINER] = lambda directory: write_state(directory, state, own, self._ranks)
        name = checkpoint_name(episode=episode, step=position.step)
        self._save_dir.write(name, writers)

    def load(self, directory: str | Path) -> tuple[Position, Learning | None]:
        """Put back models, optimizers, schedules, and what is held; loaders and random states wait for `resume`.

        With another number of ranks than wrote it, the rest of an episode that is being learnt from is left out.

        Raises:
            ModelError: if there is no whole checkpoint, or it is of other models; nothing was changed.
            ConfigError: if it is of the middle of an episode under other settings.
        """
        checkpoint = self._find(directory)
        state = read_state(checkpoint)
        check_state(state, checkpoint, self._state(Position()))
        restored = together(self._ranks, lambda: self._read_own(checkpoint, state.world_size), what="read its state")
        for role, (model, optimizer, scheduler, booster) in self._roles.items():
            path = checkpoint.path(role)
            booster.load_model(model, str(path / "modeling"))
            booster.load_optimizer(optimizer, str(path / "optimizer"))
            booster.load_lr_scheduler(scheduler, str(path / "lr_scheduler"))
        self._held.learner.load_facts(state.learner)
        self._held.controls.load_state(state.controls)
        self._held.meter.load_state(state.meter)
        self._restored = restored
        self._save_dir.goes_on_from(checkpoint)
        if state.world_size == self._ranks.world_size:
            return Position(**state.position), restored.own.learning
        return self._converted(Position(**state.position), checkpoint, state.world_size), None

    def resume(self, loaders: Mapping[str, CycledLoader]) -> None:
        """Put loaders and random states where the loaded checkpoint had them; nothing if none was loaded."""
        if self._restored is None:
            return
        own, dealt, is_fresh = self._restored
        for name, loader in loaders.items():
            if name in dealt:
                loader.load_progress(dealt[name], under(name, own.tensors), self._ranks.world_size)
            elif name in own.facts:
                loader.load_state(own.facts[name], under(name, own.tensors))
        if not is_fresh:
            set_random_states(under(_RANDOM, own.tensors))
        self._restored = None

    def _read_own(self, checkpoint: Checkpoint, stored: int) -> Restored:
        """Return what this rank goes on with, of a checkpoint that so many ranks wrote."""
        is_fresh = self._ranks.rank >= stored
        own = read_rank_state(checkpoint, 0 if is_fresh else self._ranks.rank)
        if stored == self._ranks.world_size:
            return Restored(own, {}, is_fresh)
        facts = [read_rank_facts(checkpoint, rank) for rank in range(stored)]
        dealt = {name: progress_of_all([each[name] for each in facts]) for name in own.facts}
        return Restored(own, dealt, is_fresh)

    def _converted(self, position: Position, checkpoint: Checkpoint, stored: int) -> Position:
        """Return where another number of ranks goes on: in the episode that was due, or, from its middle, in the next.

        Minibatches of an episode are cut from what each rank collected; other ranks would learn some of its samples
        twice and others never.
        """
        say = logger.warning if self._ranks.is_first else logger.debug
        moved = f"the checkpoint {checkpoint.name} is of {counted(stored, 'rank')}, and {self._ranks.world_size} go on"
        if not position.windows:
            say("%s: loaders behind as many samples as all ranks had dealt", moved)
            return position
        self._held.meter.reset()  # of the steps of the episode that ends here
        say(
            "%s: what is left of episode %d, behind step %d, is not learnt, and episode %d is collected next",
            moved, ordinal(position.episode), position.step, ordinal(position.episode + 1),
        )  # fmt: skip
        return Position(position.episode + 1, 0, position.step)

    def _find(self, directory: str | Path) -> Checkpoint:
        """Let the first rank look, which may take a while, and tell the others."""
        found: dict[str, str] = {}
        if self._ranks.is_first:
            try:
                checkpoint = find_checkpoint(directory)
                found = {"save_dir": str(checkpoint.save_dir), "name": checkpoint.name}
            except ModelError as error:
                found = {"error": str(error)}
        found = self._ranks.broadcast_object(found)
        if "error" in found:
            raise ModelError(found["error"])
        return Checkpoint(Path(found["save_dir"]), found["name"])

    def _state(self, position: Position) -> TrainerState:
        return TrainerState(
            position=asdict(position),
            world_size=self._ranks.world_size,
            shapes={
                role: weight_shapes(plain_model(trained.booster, trained.model))
                for role, trained in self._roles.items()
            },
            controls=self._held.controls.state(),
            learner=self._held.learner.facts(),
            meter=self._held.meter.state(),
            forms={role: training_form(each.optimizer, each.scheduler) for role, each in self._roles.items()},
            settings=self._settings,
        )

    def _write_model(self, directory: Path, trained: Trained, facts: dict[str, int]) -> None:
        model, optimizer, scheduler, booster = trained
        booster.save_model(model, str(directory / "modeling"), shard=True, use_safetensors=True)
        booster.save_optimizer(optimizer, str(directory / "optimizer"), shard=True)
        booster.save_lr_scheduler(scheduler, str(directory / "lr_scheduler"))

        def write_facts() -> None:
            if self._ranks.is_first:
                write_json(directory / "running_states.json", facts)

        # The next model's files begin with collectives, which a rank that failed here would not reach.
        together(self._ranks, write_facts, what="write the checkpoint")


def _rank_state(loaders: Mapping[str, CycledLoader], learning: Learning | None) -> RankState:
    states = {name: loader.state() for name, loader in loaders.items()}
    tensors = prefixed(_RANDOM, random_states())
    for name, state in states.items():
        tensors |= prefixed(name, state.tensors)
    return RankState({name: state.facts for name, state in states.items()}, tensors, learning)

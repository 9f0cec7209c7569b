"""The checkpoints of one `PPOTrainer`: what is written, when they are due, and how they are put back."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlhf_core.counting import counted, ordinal
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.ppo.controls import RewardControls
from rlhf_core.ppo.episode import Learning, Position
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.ppo.state import TrainingState, state_from_json, state_tensors, state_to_json
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

STATE = "state.json"


class RunFacts(NamedTuple):
    """What a checkpoint says of the run besides its training state, the same on all ranks, as JSON holds it."""

    world_size: int
    shapes: dict[str, dict[str, list[int]]]
    """Of every weight, by model."""
    meter: dict[str, list[float]]
    forms: dict[str, dict[str, Any]]
    """Of optimizer and schedule, by model, as `training_form` gives them."""
    settings: dict[str, Any]
    """What decides the minibatches: an episode cannot be gone on with under others."""


def write_state(directory: Path, state: TrainingState, loaders: Mapping[str, Any], ranks: Ranks) -> None:
    """Write what is common from the first rank; from each its own tensors, and where its loaders stand."""
    if ranks.is_first:
        write_json(directory / STATE, state_to_json(state))
    if ranks.speaks:
        save_file(state_tensors(state), directory / f"rank-{ranks.rank}.safetensors")
        write_json(directory / f"rank-{ranks.rank}.json", loaders)


def read_state(checkpoint: Checkpoint, rank: int) -> TrainingState:
    """Return a rank's state; the first's, if that rank wrote none.

    Raises:
        ModelError: if it is of another form.
    """
    path = checkpoint.path(TRAINER) / STATE
    otherwise = "give a checkpoint that fit wrote"
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
        tensors = path.with_name(f"rank-{rank}.safetensors")
        tensors = tensors if tensors.is_file() else path.with_name("rank-0.safetensors")
        return state_from_json(facts, load_file(tensors), where=f"the state in {path}", otherwise=otherwise)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{path} is no state of a PPO trainer ({error}); {otherwise}") from error


def read_loaders(checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """Return where a rank's loaders stood, by their names."""
    facts: dict[str, Any] = json.loads((checkpoint.path(TRAINER) / f"rank-{rank}.json").read_text())
    return facts


def check_facts(stored: RunFacts, checkpoint: Checkpoint, own: RunFacts, *, is_midway: bool) -> None:
    """See that a checkpoint fits this trainer, before anything is changed.

    Args:
        stored: from the checkpoint.
        checkpoint: where it was found.
        own: this trainer's.
        is_midway: whether it is of the middle of an episode.

    Raises:
        ModelError: if the models have other weights, or optimizers or schedules are of another form.
        ConfigError: if the middle of an episode is to be gone on with under other settings.
    """
    for role, shapes in own.shapes.items():
        there = stored.shapes.get(role, {})
        wrong = sorted(name for name in shapes.keys() | there.keys() if shapes.get(name) != there.get(name))
        if wrong:
            name = wrong[0]
            raise ModelError(
                f"the checkpoint {checkpoint.path(role)} does not fit the {role}: they disagree on "
                f"{counted(len(wrong), 'weight')} (missing, unknown or of another shape), such as {name} "
                f"({there.get(name)} there, {shapes.get(name)} here); build the models as the run did that wrote it"
            )
    for role, form in own.forms.items():
        check_training_form(stored.forms.get(role, {}), form, where=checkpoint.path(role))
    changed = sorted(name for name, value in stored.settings.items() if own.settings.get(name) != value)
    # Other ranks do not go on with the middle of an episode, but with the next one.
    if changed and is_midway and stored.world_size == own.world_size:
        name = changed[0]
        raise ConfigError(
            f"the checkpoint {checkpoint.name} is from mid-episode with {name} {stored.settings[name]}, but "
            f"this trainer has {own.settings.get(name)}; go on with the same settings, or from the end of an episode"
        )


def weight_shapes(model: nn.Module) -> dict[str, list[int]]:
    """Return the shape of every weight by its name, as JSON holds it."""
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


logger = logging.getLogger(__name__)

_RANDOM = "random"


class Held(NamedTuple):
    """What a trainer holds besides its models."""

    learner: PPOLearner
    controls: RewardControls
    meter: MeanMeter


class Restored(NamedTuple):
    """What waits for the loaders of a fit."""

    tensors: Mapping[str, Tensor]
    """Random states, of now and of each loader's pass, by `<whose>.<which>`: this rank's, the first's where it had
    none."""
    facts: Mapping[str, Any]
    """Where its loaders stood."""
    given: dict[str, LoaderProgress]
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
        states = {name: loader.state() for name, loader in loaders.items()}
        tensors = prefixed(_RANDOM, random_states())
        for name, each in states.items():
            tensors |= prefixed(name, each.tensors)
        state = TrainingState(
            position, self._held.learner.facts(), self._held.controls.state(), tensors, learning,
            front=self._facts()._asdict(),
        )  # fmt: skip
        stand = {name: each.facts for name, each in states.items()}
        facts = {"epoch": episode, "step": position.step, "sample_start_index": loaders["prompts"].samples_given}
        writers: dict[str, Callable[[Path], None]] = {
            role: lambda directory, trained=trained: self._write_model(directory, trained, facts)  # type: ignore[misc]
            for role, trained in self._roles.items()
        }
        writers[TRAINER] = lambda directory: write_state(directory, state, stand, self._ranks)
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
        state = together(self._ranks, lambda: read_state(checkpoint, self._ranks.rank), what="read its state")
        facts = _facts_of(state, checkpoint)
        check_facts(facts, checkpoint, self._facts(), is_midway=state.position.windows > 0)
        restored = together(
            self._ranks, lambda: self._read_own(checkpoint, state, facts.world_size), what="read its state"
        )
        for role, (model, optimizer, scheduler, booster) in self._roles.items():
            path = checkpoint.path(role)
            booster.load_model(model, str(path / "modeling"))
            booster.load_optimizer(optimizer, str(path / "optimizer"))
            booster.load_lr_scheduler(scheduler, str(path / "lr_scheduler"))
        self._held.learner.load_facts(state.learner)
        self._held.controls.load_state(state.controls or {})
        self._held.meter.load_state(facts.meter)
        self._restored = restored
        self._save_dir.goes_on_from(checkpoint)
        if facts.world_size == self._ranks.world_size:
            return state.position, state.learning
        return self._converted(state.position, checkpoint, facts.world_size), None

    def resume(self, loaders: Mapping[str, CycledLoader]) -> None:
        """Put loaders and random states where the loaded checkpoint had them; nothing if none was loaded."""
        if self._restored is None:
            return
        tensors, facts, given, is_fresh = self._restored
        for name, loader in loaders.items():
            if name in given:
                loader.load_progress(given[name], under(name, tensors), self._ranks.world_size)
            elif name in facts:
                loader.load_state(facts[name], under(name, tensors))
        if not is_fresh:
            set_random_states(under(_RANDOM, tensors))
        self._restored = None

    def _read_own(self, checkpoint: Checkpoint, state: TrainingState, stored: int) -> Restored:
        """Return what this rank's loaders go on with, of a checkpoint that so many ranks wrote."""
        is_fresh = self._ranks.rank >= stored
        own = read_loaders(checkpoint, 0 if is_fresh else self._ranks.rank)
        if stored == self._ranks.world_size:
            return Restored(state.tensors, own, {}, is_fresh)
        facts = [read_loaders(checkpoint, rank) for rank in range(stored)]
        given = {name: progress_of_all([each[name] for each in facts]) for name in own}
        return Restored(state.tensors, own, given, is_fresh)

    def _converted(self, position: Position, checkpoint: Checkpoint, stored: int) -> Position:
        """Return where another number of ranks goes on: in the episode that was due, or, from its middle, in the next.

        Minibatches of an episode are cut from what each rank collected; other ranks would learn some of its samples
        twice and others never.
        """
        say = logger.warning if self._ranks.is_first else logger.debug
        moved = f"the checkpoint {checkpoint.name} is of {counted(stored, 'rank')}, and {self._ranks.world_size} go on"
        if not position.windows:
            say("%s: loaders behind as many samples as all ranks had given", moved)
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

    def _facts(self) -> RunFacts:
        return RunFacts(
            world_size=self._ranks.world_size,
            shapes={
                role: weight_shapes(plain_model(trained.booster, trained.model))
                for role, trained in self._roles.items()
            },
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


def _facts_of(state: TrainingState, checkpoint: Checkpoint) -> RunFacts:
    try:
        return RunFacts(**state.front)
    except TypeError as error:
        path = checkpoint.path(TRAINER) / STATE
        raise ModelError(f"{path} is no state of a PPO trainer ({error}); give a checkpoint that fit wrote") from error

"""The checkpoints of one `PPOTrainer`: when they are due, what is written, and how it is put back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.trainer.checkpoint import Checkpoint, find_checkpoint, training_form, write_json
from rlhf_core.trainer.loaders import CycledLoader
from rlhf_core.trainer.named_tensors import prefixed, under
from rlhf_core.trainer.optim import Trained
from rlhf_core.trainer.ppo.controls import RewardControls
from rlhf_core.trainer.ppo.learner import PPOLearner
from rlhf_core.trainer.ppo.ol_trainer import Position
from rlhf_core.trainer.ppo.state import (
    Learning,
    RankState,
    TrainerState,
    check_state,
    read_rank_state,
    read_state,
    weight_shapes,
    write_state,
)
from rlhf_core.trainer.random_state import random_states, set_random_states
from rlhf_core.trainer.run_directory import TRAINER, checkpoint_name
from rlhf_core.trainer.save_dir import SaveDir
from rlhf_core.trainer.tracking import MeanMeter

_RANDOM = "random"


class Held(NamedTuple):
    """What a trainer holds besides its models."""

    learner: PPOLearner
    controls: RewardControls
    meter: MeanMeter


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
        self._restored: RankState | None = None

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
        facts = {"epoch": episode, "step": position.step, "sample_start_index": loaders["prompts"].samples_dealt}
        writers: dict[str, Callable[[Path], None]] = {
            role: lambda directory, trained=trained: self._write_model(directory, trained, facts)  # type: ignore[misc]
            for role, trained in self._roles.items()
        }
        writers[TRAINER] = lambda directory: write_state(directory, state, own, self._ranks)
        name = checkpoint_name(episode=episode, step=position.step)
        self._save_dir.write(name, writers)

    def load(self, directory: str | Path) -> tuple[Position, Learning | None]:
        """Put back models, optimizers, schedules, and what is held; loaders and random states wait for `resume`.

        Raises:
            ModelError: if there is no whole checkpoint, or it is of other models; nothing was changed.
            ConfigError: if it is of more or fewer ranks, or of the middle of an episode under other settings.
        """
        checkpoint = self._find(directory)
        state = read_state(checkpoint)
        check_state(state, checkpoint, self._state(Position()))
        own = read_rank_state(checkpoint, self._ranks)
        for role, (model, optimizer, scheduler, booster) in self._roles.items():
            path = checkpoint.path(role)
            booster.load_model(model, str(path / "modeling"))
            booster.load_optimizer(optimizer, str(path / "optimizer"))
            booster.load_lr_scheduler(scheduler, str(path / "lr_scheduler"))
        self._held.learner.load_facts(state.learner)
        self._held.controls.load_state(state.controls)
        self._held.meter.load_state(state.meter)
        self._restored = own
        self._save_dir.goes_on_from(checkpoint)
        return Position(**state.position), own.learning

    def resume(self, loaders: Mapping[str, CycledLoader]) -> None:
        """Put loaders and random states where the loaded checkpoint had them; nothing if none was loaded."""
        if self._restored is None:
            return
        for name, loader in loaders.items():
            if name in self._restored.facts:
                loader.load_state(self._restored.facts[name], under(name, self._restored.tensors))
        set_random_states(under(_RANDOM, self._restored.tensors))
        self._restored = None

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
            shapes={role: weight_shapes(trained.model) for role, trained in self._roles.items()},
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
        if self._ranks.is_first:
            write_json(directory / "running_states.json", facts)


def _rank_state(loaders: Mapping[str, CycledLoader], learning: Learning | None) -> RankState:
    states = {name: loader.state() for name, loader in loaders.items()}
    tensors = prefixed(_RANDOM, random_states())
    for name, state in states.items():
        tensors |= prefixed(name, state.tensors)
    return RankState({name: state.facts for name, state in states.items()}, tensors, learning)

"""What a detached PPO trainer writes and reads: models and optimizers by themselves, or its whole state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_core.coati.detached.controls_of_episodes import EpisodesControls
from rlhf_core.coati.detached.replay_buffer import DetachedReplayBuffer
from rlhf_core.coati.detached.sources import DealtExperience, Source
from rlhf_core.coati.detached.trainer_state import PPOTrainerState, read_trainer_state, write_trainer_state
from rlhf_core.coati.detached.weight_sender import WeightSender
from rlhf_core.errors import ConfigError
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.rollout.books import Books
from rlhf_core.strategy.liveness import naming_lost_rank
from rlhf_core.strategy.strategy import Strategy
from rlhf_core.training.loaders import CycledLoader
from rlhf_core.types import Experience


class TrainerFiles:
    """Every method is called on all ranks; the first writes what is the same on all."""

    strategy: Strategy
    train_batch_size: int
    _weights: WeightSender
    _source: Source | None
    _episode: int
    _fit_began: int | None
    _controls_kept: EpisodesControls
    _demonstrations: CycledLoader | None
    _buffer: DetachedReplayBuffer
    _is_in_midst: bool
    _is_unsent: bool
    _books: dict[str, Any] | None = None
    """Of an episode that was restored."""

    @property
    @abstractmethod
    def learner(self) -> PPOLearner:
        """The learner, once it is built."""

    def strategy_save_actor(self, path: str, only_rank0: bool = False) -> None:  # noqa: ARG002 - one form for all
        """Write the actor's weights, to one file that any strategy loads; `only_rank0` is without effect."""
        model = self._model("actor")
        self.strategy.save_model(model, path)

    def strategy_save_critic(self, path: str, only_rank0: bool = False) -> None:  # noqa: ARG002 - one form for all
        """Write the critic's weights, as `strategy_save_actor` does."""
        model = self._model("critic")
        self.strategy.save_model(model, path)

    def strategy_save_actor_optim(self, path: str, only_rank0: bool = False) -> None:  # noqa: ARG002
        """Write the state of the actor's optimizer, to one file."""
        optimizer = self._optimizer("actor")
        self.strategy.save_optimizer(optimizer, path)

    def strategy_save_critic_optim(self, path: str, only_rank0: bool = False) -> None:  # noqa: ARG002
        """Write the state of the critic's optimizer, to one file."""
        optimizer = self._optimizer("critic")
        self.strategy.save_optimizer(optimizer, path)

    def strategy_load_actor(self, path: str) -> None:
        """Put back what `strategy_save_actor` wrote; makers get it with the next weights that are sent."""
        model = self._model("actor")
        self.strategy.load_model(model, path)
        self._weights.learnt()

    def strategy_load_critic(self, path: str) -> None:
        """Put back what `strategy_save_critic` wrote."""
        model = self._model("critic")
        self.strategy.load_model(model, path)
        self._weights.learnt()

    def strategy_load_actor_optim(self, path: str) -> None:
        """Put back what `strategy_save_actor_optim` wrote."""
        optimizer = self._optimizer("actor")
        self.strategy.load_optimizer(optimizer, path)

    def strategy_load_critic_optim(self, path: str) -> None:
        """Put back what `strategy_save_critic_optim` wrote."""
        optimizer = self._optimizer("critic")
        self.strategy.load_optimizer(optimizer, path)

    def save_state(self, path: str | Path) -> None:
        """Write all that an exact continuation needs: learner, position, controls, books, loaders and buffer.

        With a staleness above 0, what makers have made ahead is not in it: it is made again. What others push into the
        buffer later is not in it either.
        """
        self.learner  # noqa: B018 - raises what building ended with
        with naming_lost_rank(self.strategy.ranks):
            self._save_state(Path(path))

    def _save_state(self, directory: Path) -> None:
        tensors, facts = self.learner.state()
        waiting = self._buffer.waiting()
        position = {"episode": self._episode, "fit_began": self._fit_began, "version": self._weights.version}
        facts = {
            "learner": facts,
            "position": position,
            "controls": self._controls_kept.state(),
            "books": self._books_now(),
            "train_batch_size": self.train_batch_size,
            "waiting": len(waiting),
        }
        tensors = {**tensors, **_flat(waiting)}
        loader = self._demonstrations
        state = PPOTrainerState(tensors, facts, None if loader is None else loader.state())
        write_trainer_state(directory, state, self.strategy.ranks)

    def load_state(self, path: str | Path) -> None:
        """Go on from a state that `save_state` wrote, before a fit: the fit that was under way goes on where it stood.

        Makers are sent these weights by `sync_models_to_remote_makers`, and begin their loops anew.

        Raises:
            ModelError: if there is no whole state, or it is of other models; nothing was changed.
            ConfigError: if it is of another train_batch_size.
        """
        state = read_trainer_state(Path(path), self.strategy.ranks)
        facts = state.facts
        if facts["train_batch_size"] != self.train_batch_size:
            raise ConfigError(
                f"the state in {path} was learnt with train_batch_size {facts['train_batch_size']}, but this trainer "
                f"has {self.train_batch_size}; give it the same"
            )
        prefixes = tuple(_prefix(place) for place in range(facts["waiting"]))
        own = {name: tensor for name, tensor in state.tensors.items() if not name.startswith(prefixes)}
        self.learner.load_state(own, facts["learner"])
        self._buffer.restore(_unflat(state.tensors, prefixes))
        self._controls_kept.load_state(facts["controls"])
        self._books, self._source = facts["books"], None
        self._is_in_midst = self._is_unsent = False
        self._episode, self._fit_began = facts["position"]["episode"], facts["position"]["fit_began"]
        self._weights.restore(facts["position"]["version"])
        if self._demonstrations is not None and state.demonstrations is not None:
            self._demonstrations.load_state(*state.demonstrations)

    def _books_now(self) -> dict[str, Any] | None:
        """Return the books of what this trainer's fits have dealt, and of those before it."""
        if not isinstance(self._source, DealtExperience):
            return self._books
        books = Books(**self._source.ledger.facts())
        return books._replace(lost=books.lost + books.waiting, waiting=0)._asdict()  # what is made ahead is made again

    def _model(self, role: Any) -> Any:
        return self._trained(role).model

    def _optimizer(self, role: Any) -> Any:
        return self._trained(role).optimizer

    def _trained(self, role: Any) -> Any:
        trained = self.learner.trained(role)
        if trained is None:
            raise ConfigError(f"this trainer has no {role}, as its advantage estimator needs none")
        return trained


def _prefix(place: int) -> str:
    return f"waiting.{place}."


def _flat(waiting: Sequence[Experience]) -> dict[str, Tensor]:
    """Return the tensors of what waits in a buffer, by name."""
    return {
        _prefix(place) + name: tensor for place, each in enumerate(waiting) for name, tensor in each.tensors().items()
    }


def _unflat(tensors: Mapping[str, Tensor], prefixes: Sequence[str]) -> list[Experience]:
    """Return what `_flat` took apart."""
    found = []
    for prefix in prefixes:
        arrays = {
            name.removeprefix(prefix): tensor.numpy() for name, tensor in tensors.items() if name.startswith(prefix)
        }
        found.append(Experience.from_numpy(arrays))
    return found

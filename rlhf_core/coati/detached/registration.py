"""Who makes experience for a trainer: makers register for a fit, and must fit each other and what is to be learnt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rlhf_core.counting import counted
from rlhf_core.errors import ConfigError, RlhfError

LoopState = Literal["waiting", "working", "over"]


class MissingMakersError(RlhfError):
    """Makers that a trainer names have not begun to work in time."""


@dataclass(frozen=True, slots=True)
class MakerFacts:
    """What a maker says of itself when its loop begins."""

    name: str
    batches: int | None
    """Of its loader in a pass; None if the loader does not say."""
    steps: int
    """Batches that it contributes."""
    rows: int
    """Samples that are made of one batch."""
    digest: str
    """Of its loader's first batch."""
    kl_coef: float
    seed: int
    options: Mapping[str, Any]
    """`PPOOptions`, as plain values."""
    temperature: float
    max_new_tokens: int
    sampling: Mapping[str, Any]
    """All of how responses are drawn, as it was given."""
    has_no_weights: bool
    """It was told to begin with a trainer's weights, and was given none yet."""


class Production(NamedTuple):
    """What a fit takes."""

    episodes: int
    update_steps: int
    """Batches of one trainer in an episode."""
    train_batch_size: int
    trainers: int

    @property
    def samples_per_episode(self) -> int:
        """Of all trainers together."""
        return self.update_steps * self.train_batch_size * self.trainers


def production_of(total_steps: int, update_steps: int, train_epochs: int, train_batch_size: int) -> Production:
    """Return what a fit of one trainer takes.

    Raises:
        ConfigError: if a count is below 1, or there is no whole episode.
    """
    counts = {"total_steps": total_steps, "update_steps": update_steps, "train_epochs": train_epochs}
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"{name} must be at least 1, got {count}")
    if total_steps < update_steps:
        raise ConfigError(f"total_steps {total_steps} is less than one episode's update_steps {update_steps}; raise it")
    return Production(total_steps // update_steps, update_steps, train_batch_size, 1)


class Registry:
    """The makers' loops that a trainer knows of; every method may be called by any thread.

    Args:
        trainer: its name, for messages.
        names: of the makers that it may expect.
    """

    def __init__(self, trainer: str, names: Sequence[str]) -> None:
        self._trainer, self._names = trainer, tuple(names)
        self._facts: dict[str, MakerFacts] = {}
        self._loaders: dict[str, Callable[[], Any]] = {}
        self._tickets: dict[str, int] = {}
        self._given = 0
        self._is_working = False
        self._changed = threading.Condition()

    def register(self, facts: MakerFacts, dataloader_fn: Callable[[], Any]) -> int:
        """Take in a maker whose loop begins; return the number of the loop.

        Args:
            facts: of the maker.
            dataloader_fn: builds its loader, for the maker's next process if this one dies.

        Raises:
            ConfigError: if this trainer does not name the maker, or another maker has another loader.
        """
        with self._changed:
            if facts.name not in self._names:
                raise ConfigError(
                    f"{facts.name} names {self._trainer}, but is not among the makers that {self._trainer} names "
                    f"({', '.join(self._names) or 'none'}); add it to experience_maker_holder_name_list"
                )
            for other in self._facts.values():
                if other.name != facts.name:
                    check_same_work(other, facts)
            self._given += 1
            self._facts[facts.name], self._loaders[facts.name] = facts, dataloader_fn
            self._tickets[facts.name] = self._given
            self._changed.notify_all()
            return self._given

    def loader_of(self, name: str) -> Callable[[], Any] | None:
        """Return what builds a maker's loader; None if it has none here."""
        with self._changed:
            return self._loaders.get(name)

    def state_of(self, name: str, ticket: int) -> LoopState:
        """Return what has become of a loop."""
        with self._changed:
            if self._tickets.get(name) != ticket:
                return "over"
            return "working" if self._is_working else "waiting"

    def await_makers(self, timeout_s: float, unless: Callable[[], bool]) -> list[MakerFacts]:
        """Wait until every maker that is named has registered; return their facts, in the order of their names.

        Args:
            timeout_s: longest wait.
            unless: ends the wait too; then nothing is returned.

        Raises:
            MissingMakersError: if some have not; it names them.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while missing := [name for name in self._names if name not in self._facts]:
                if unless():
                    return []
                if time.monotonic() >= deadline:
                    raise MissingMakersError(
                        f"waited {timeout_s:g} s for {', '.join(missing)} to begin, and no experience came; start "
                        f"workingloop of each maker that {self._trainer} names, or name none"
                    )
                self._changed.wait(0.1)
            self._is_working = True
            return [self._facts[name] for name in self._names]

    def end(self) -> None:
        """Let all loops end."""
        with self._changed:
            self._facts, self._loaders, self._tickets = {}, {}, {}
            self._is_working = False
            self._changed.notify_all()


def check_same_work(one: MakerFacts, other: MakerFacts) -> None:
    """See that two makers read one line of batches, and make the same of it.

    Raises:
        ConfigError: otherwise; it names both.
    """
    both = f"{one.name} and {other.name}"
    if (one.batches, one.rows) != (other.batches, other.rows):
        raise ConfigError(
            f"the dataloaders of {both} differ in the number of batches ({one.batches} and {other.batches}) or in "
            f"samples of each ({one.rows} and {other.rows}), but any maker must be able to make any batch; give all "
            "makers the same dataloader_fn"
        )
    if one.digest != other.digest:
        raise ConfigError(
            f"the dataloaders of {both} begin with different batches, but any maker must be able to make any batch; "
            "give all makers the same dataloader_fn, with a seed of its own if it shuffles"
        )
    for name in ("kl_coef", "seed", "options", "temperature", "max_new_tokens", "sampling"):
        first, second = getattr(one, name), getattr(other, name)
        if first != second:
            raise ConfigError(
                f"{both} differ in {_difference(name, first, second)}; build all makers of a run with the same values"
            )


def check_like_trainer(maker: MakerFacts, trainer: str, **expected: Any) -> None:
    """See that a maker works by the values that its trainer learns by.

    Args:
        maker: what it says of itself.
        trainer: its name.
        **expected: fields of `MakerFacts` by name, as the trainer has them.

    Raises:
        ConfigError: otherwise; it names both.
    """
    for name, value in expected.items():
        said = getattr(maker, name)
        if said != value:
            raise ConfigError(
                f"{maker.name} and {trainer} differ in {_difference(name, said, value)}; build makers and trainers of "
                "a run with the same values"
            )


def check_needs_no_weights(makers: Sequence[MakerFacts], version: int) -> None:
    """See, where a trainer has sent no weights, that its makers may begin with their own.

    Raises:
        ConfigError: if one was told to wait, or the trainer no longer stands at the beginning.
    """
    empty = [maker.name for maker in makers if maker.has_no_weights]
    if empty or version:
        who = ", ".join(empty) or f"makers of a trainer that stands at version {version}"
        raise ConfigError(
            f"{who} wait for a trainer's weights, and were sent none; call sync_models_to_remote_makers first"
        )


def units_per_episode(makers: Sequence[MakerFacts], wanted: Production) -> int:
    """Return how many of the makers' batches an episode learns from.

    Args:
        makers: at least one, of the same work.
        wanted: by the fit.

    Raises:
        ConfigError: if the makers' batches do not make up the episodes exactly.
    """
    rows, made = makers[0].rows, sum(maker.steps for maker in makers)
    needed = wanted.episodes * wanted.samples_per_episode
    if wanted.samples_per_episode % rows:
        raise ConfigError(
            f"an episode learns from {counted(wanted.samples_per_episode, 'sample')} (update_steps "
            f"{wanted.update_steps} x train_batch_size {wanted.train_batch_size} x "
            f"{counted(wanted.trainers, 'trainer')}), which are not whole batches of the makers' dataloader, of "
            f"{counted(rows, 'sample')} each; choose sizes that divide"
        )
    if made * rows != needed:
        raise ConfigError(
            f"fit learns from {counted(needed, 'sample')} ({counted(wanted.episodes, 'episode')} of update_steps "
            f"{wanted.update_steps} x train_batch_size {wanted.train_batch_size} x "
            f"{counted(wanted.trainers, 'trainer')}), but the makers' loops make {made * rows} "
            f"({counted(made, 'batch', 'batches')} of {rows}); let them make "
            f"{counted(needed // rows, 'batch', 'batches')}, or fit "
            f"{made * rows // (wanted.train_batch_size * wanted.trainers)} total_steps"
        )
    return wanted.samples_per_episode // rows


def _difference(name: str, first: Any, second: Any) -> str:
    """Return in words where two values of a field differ."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        keys = [key for key in {**first, **second} if first.get(key) != second.get(key)]
        name, first, second = f"{name}.{keys[0]}", first.get(keys[0]), second.get(keys[0])
    return f"{name} ({first} and {second})"

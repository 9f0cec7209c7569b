"""Detached trainers that are ranks of one group: what they tell each other, and what the first hands to the others."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray
import torch

from rlhf_core.coati.prompt_batches import demonstrations_of
from rlhf_core.errors import ConfigError
from rlhf_core.models.compatibility import vocabulary_size
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.strategy.ranks import Ranks, together
from rlhf_core.training.loaders import Batches, CycledLoader
from rlhf_core.training.padding import PaddedBatch


class RankFacts(NamedTuple):
    """What each trainer tells the others when they have met."""

    name: str
    """Of its actor."""
    holders: tuple[str, ...]
    """Makers that it names."""
    train_batch_size: int


def tell_each_other(own: RankFacts, ranks: Ranks) -> list[RankFacts]:
    """Return what every rank says, in their order, the same list on each; called by all of them.

    Raises:
        ConfigError: on all ranks, if they have different batches, or the first has no name to be found by.
    """
    if ranks.everyone.world_size == 1:
        return [own]
    line = torch.frombuffer(bytearray(json.dumps(own).encode() + b"\n"), dtype=torch.uint8)
    lines = bytes(ranks.everyone.gather(line).tolist()).splitlines()
    found = [RankFacts(name, tuple(holders), size) for name, holders, size in map(json.loads, lines)]
    sizes = [each.train_batch_size for each in found]
    if len(set(sizes)) > 1:
        raise ConfigError(f"the ranks of one trainer have train_batch_size {sizes}; give all of them the same")
    if not found[0].name:
        raise ConfigError("rank 0 of several trainers has no name to be found by; create it with options(name=...)")
    return found


def all_holders(ranks: Sequence[RankFacts]) -> tuple[str, ...]:
    """Return the makers that any rank names, each once, in the order of the ranks."""
    return tuple(dict.fromkeys(name for each in ranks for name in each.holders))


class Found(NamedTuple):
    """What the first rank answers."""

    references: list[Any]
    """Of the episode's rows as plain arrays, inside a list so that Ray leaves fetching to whoever asked; none yet if it
    is empty."""
    trouble: str
    """What ended the first rank's fit; empty while nothing did."""


class Shelf:
    """The first rank's: holds the last episodes' experience for the other ranks; any thread may look."""

    def __init__(self) -> None:
        self._episodes: dict[int, Any] = {}
        self._trouble = ""
        self._guard = threading.Lock()

    def begin(self) -> None:
        """Forget what an earlier fit ended with."""
        with self._guard:
            self._episodes, self._trouble = {}, ""

    def put(self, episode: int, arrays: Callable[[], Any]) -> None:
        """Hold an episode, in the object store; the one before the last is forgotten."""
        reference = ray.put(arrays())
        with self._guard:
            self._episodes = {known: held for known, held in self._episodes.items() if known >= episode - 1}
            self._episodes[episode] = reference

    def fail(self, error: BaseException) -> None:
        """Let the others know that nothing more comes."""
        with self._guard:
            self._trouble = (str(error).strip() or type(error).__name__).splitlines()[0]

    def look(self, episode: int) -> Found:
        """Return what is known of an episode."""
        with self._guard:
            held = self._episodes.get(episode)
            return Found([] if held is None else [held], self._trouble)


def agreed_plan(ranks: Ranks, *numbers: int) -> None:
    """See that all ranks were called with the same numbers, by which each knows when the others do what.

    Raises:
        ConfigError: on all ranks, if they were not.
    """
    plans = ranks.everyone.gather(torch.tensor([numbers])).tolist()
    for rank, plan in enumerate(plans):
        if plan != plans[0]:
            raise ConfigError(
                f"fit of rank {rank} has total_steps, update_steps, train_epochs and episode {plan}, that of rank 0 "
                f"{plans[0]}; call it with the same on all ranks"
            )


def demonstrations_loader(dataloader_fn: Callable[[], Batches] | None, ptx_coef: float) -> CycledLoader | None:
    """Return the loader of demonstrations, if any are learnt.

    Raises:
        ConfigError: if they are to be, and there are none.
    """
    if ptx_coef <= 0:
        return None
    if dataloader_fn is None:
        raise ConfigError(f"ptx_coef is {ptx_coef}, but there is no pretrain_dataloader_fn; give one, or set it to 0.0")
    loader: Any = dataloader_fn()
    return CycledLoader(loader, what="the trainer's pretrain_dataloader_fn")


def next_demonstrations(
    loader: CycledLoader | None, learner: PPOLearner, ranks: Ranks, batches: int, *, only_labels: bool
) -> PaddedBatch | None:
    """Return this rank's next demonstrations as one batch; None if none are learnt. Called by all ranks.

    Args:
        loader: of this rank.
        learner: whose model reads them.
        ranks: who learns together.
        batches: of the loader.
        only_labels: learn those tokens that have labels.
    """
    if loader is None:
        return None

    def read() -> PaddedBatch:
        return demonstrations_of(
            [loader.next() for _ in range(batches)],
            device=learner.device,
            only_labels=only_labels,
            vocabulary=vocabulary_size(learner.actor),
        )

    return together(ranks, read, what="read its demonstrations")

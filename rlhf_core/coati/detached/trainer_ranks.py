"""Trainers that are the ranks of one group: who they are, and how the first hands experience to the others."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray
import torch

from rlhf_core.errors import ConfigError
from rlhf_core.strategy.ranks import Ranks


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
    if ranks.world_size == 1:
        return [own]
    line = torch.frombuffer(bytearray(json.dumps(own).encode() + b"\n"), dtype=torch.uint8)
    lines = bytes(ranks.gather(line).tolist()).splitlines()
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

"""Data loaders that never end, and that go on after a restart where they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_core.errors import DataError
from rlhf_core.trainer.random_state import random_states, set_random_states

Batches = Iterable[Mapping[str, Any]]

_GENERATOR = "generator"


class LoaderState(NamedTuple):
    """Where a loader stands: enough to deal the same batches again."""

    facts: dict[str, int]
    """The pass, from 0; batches and samples dealt in it."""
    tensors: dict[str, Tensor]
    """Random states at the pass's beginning, which decided its order."""


class CycledLoader:
    """Deals the batches of a loader again and again.

    A distributed sampler is told the number of each pass. What shuffles may draw from the loader's own generator or
    from the global ones; a dataset that draws random numbers in `__getitem__` is not repeated to the bit.

    Args:
        loader: what `iter` gives batches of, each pass anew: a DataLoader, or a list.
        what: names it in messages.

    Raises:
        DataError: when the first batch is asked for, if there is none.
    """

    def __init__(self, loader: Batches, *, what: str) -> None:
        self._loader = loader
        self._what = what
        self._pass = -1
        self._batches = 0
        self._samples = 0
        self._iterator: Iterator[Mapping[str, Any]] = iter(())
        self._begun: dict[str, Tensor] = {}

    @property
    def samples_dealt(self) -> int:
        """Samples of the current pass that were dealt."""
        return self._samples

    def next(self) -> Mapping[str, Any]:
        """Return the next batch; after the last one, the first of the next pass."""
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._begin_pass(self._pass + 1)
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise DataError(f"{self._what} holds no batch; give at least one") from None
        self._batches += 1
        self._samples += len(batch["input_ids"])
        return batch

    def state(self) -> LoaderState:
        """Return where this loader stands."""
        facts = {"pass": self._pass, "batches": self._batches, "samples": self._samples}
        return LoaderState(facts, dict(self._begun))

    def load_state(self, facts: Mapping[str, int], tensors: Mapping[str, Tensor]) -> None:
        """Begin the stored pass again and throw away what it had dealt; the global random states come out as they were.

        Raises:
            DataError: if the pass has fewer batches now: the data are others.
        """
        if facts["pass"] < 0:
            return
        kept = random_states()
        set_random_states({name: state for name, state in tensors.items() if not name.startswith(_GENERATOR)})
        for number, generator in enumerate(self._generators()):
            generator.set_state(tensors[f"{_GENERATOR}.{number}"])
        self._begin_pass(facts["pass"])
        for _ in range(facts["batches"]):
            if next(self._iterator, None) is None:
                raise DataError(
                    f"{self._what} has fewer batches than the {facts['batches']} that the checkpoint had dealt; "
                    "give the data that the run began with"
                )
        self._batches, self._samples = facts["batches"], facts["samples"]
        set_random_states(kept)

    def _begin_pass(self, number: int) -> None:
        self._pass, self._batches, self._samples = number, 0, 0
        set_epoch = getattr(getattr(self._loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(number)
        self._begun = random_states()
        for place, generator in enumerate(self._generators()):
            self._begun[f"{_GENERATOR}.{place}"] = generator.get_state()
        self._iterator = iter(self._loader)

    def _generators(self) -> list[torch.Generator]:
        """Return the loader's own generators, each once."""
        sampler = getattr(self._loader, "sampler", None)
        found = (getattr(self._loader, "generator", None), getattr(sampler, "generator", None))
        unique = {id(generator): generator for generator in found if generator is not None}
        return list(unique.values())

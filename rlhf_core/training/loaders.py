"""Data loaders that begin again after their last batch, and that go on after a restart where they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_core.counting import counted
from rlhf_core.errors import DataError
from rlhf_core.training.modes import random_states, set_random_states

Batches = Iterable[Mapping[str, Any]]

_GENERATOR = "generator"


class LoaderState(NamedTuple):
    """Where a loader stands: enough to give the same batches again."""

    facts: dict[str, int]
    """The pass, from 0; batches and samples given in it."""
    tensors: dict[str, Tensor]
    """Random states at the pass's beginning, which decided its order."""


class LoaderProgress(NamedTuple):
    """How far several ranks together were in a pass over their loaders."""

    number: int
    """Of the pass, from 0; -1 if none has begun one."""
    samples: int
    """Given in it by all of them."""
    spare: int
    """Up to a batch of each of them: ranks of another number may have so many samples fewer, for want of padding."""


class LoaderPlace(NamedTuple):
    """Where a loader stands in this process, also before its first pass."""

    state: LoaderState
    generators: list[Tensor]
    """States of its own generators, which decide the order of the next pass."""


class CycledLoader:
    """Gives the batches of a loader again and again.

    A distributed sampler is told the number of each pass. What shuffles may draw from the loader's own generator or
    from the global ones; a dataset that draws random numbers in `__getitem__` is not repeated to the bit.

    Args:
        loader: what `iter` gives batches of, each pass from the start: a DataLoader, or a list.
        what: names it in messages.

    Raises:
        DataError: when the first batch is asked for, if there is none; or when another pass is due, and the loader is
            an iterator that can be gone through only once.
    """

    def __init__(self, loader: Batches, *, what: str) -> None:
        self._loader = loader
        self._what = what
        self._pass = -1
        self._batches = 0
        self._samples = 0
        self._iterator: Iterator[Mapping[str, Any]] = iter(())
        self._iterated = False
        self._begun: dict[str, Tensor] = {}

    @property
    def samples_given(self) -> int:
        """Samples of the current pass that were given."""
        return self._samples

    def gives_from(self, loader: Batches | None) -> bool:
        """Whether this is the loader whose batches are given."""
        return self._loader is loader

    def next(self) -> Mapping[str, Any]:
        """Return the next batch; after the last one, the first of the next pass."""
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._begin_pass(self._pass + 1)
            try:
                batch = next(self._iterator)
            except StopIteration:
                if is_one_shot(self._loader):
                    raise self._once_only() from None
                raise DataError(f"{self._what} holds no batch; give at least one") from None
        self._count(batch, "input_ids")
        return batch

    def state(self) -> LoaderState:
        """Return where this loader stands."""
        facts = {"pass": self._pass, "batches": self._batches, "samples": self._samples}
        return LoaderState(facts, dict(self._begun))

    def load_state(self, facts: Mapping[str, int], tensors: Mapping[str, Tensor]) -> None:
        """Begin the stored pass again and throw away what it had given; the global random states come out as they were.

        Raises:
            DataError: if the pass has fewer batches now, or the loader other generators: the data are others.
        """
        if facts["pass"] < 0:
            return
        with self._begun_again(facts["pass"], tensors):
            for _ in range(facts["batches"]):
                if next(self._iterator, None) is None:
                    raise DataError(
                        f"{self._what} has fewer batches than the {facts['batches']} that the checkpoint had used; "
                        "give the data that the run began with"
                    )
            self._batches, self._samples = facts["batches"], facts["samples"]

    def load_progress(self, progress: LoaderProgress, tensors: Mapping[str, Tensor], world_size: int) -> None:
        """Begin a stored pass again where ranks of another number stood: behind as many samples of all ranks.

        If they cannot be divided evenly, behind a batch more: no sample of the pass is given twice.

        Args:
            progress: of all of them.
            tensors: random states at the pass's beginning, of this rank or the first.
            world_size: ranks that go on.

        Raises:
            DataError: if the pass has fewer samples now, or the loader other generators: the data are others.
        """
        if progress.number < 0:
            return
        with self._begun_again(progress.number, tensors):
            while self._samples * world_size < progress.samples:
                batch = next(self._iterator, None)
                if batch is not None:
                    self._count(batch)
                elif self._samples * world_size + progress.spare < progress.samples:
                    raise DataError(
                        f"{self._what} has {counted(self._samples, 'sample')} on each of {world_size} ranks, fewer "
                        f"than the {progress.samples} that the checkpoint had used on all; give the data that the run "
                        "began with"
                    )
                else:
                    break

    @contextmanager
    def _begun_again(self, number: int, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Run the block at the beginning of a stored pass; the global random states come out as they were."""
        own = {f"{_GENERATOR}.{number}" for number, _ in enumerate(self._generators())}
        if own != {name for name in tensors if name.startswith(_GENERATOR)}:
            raise DataError(
                f"{self._what} has {len(own) or 'no'} random generator of its own, other than when the checkpoint was "
                "written, so its order cannot be repeated; build it as the run did that wrote it"
            )
        kept = random_states()
        set_random_states({name: state for name, state in tensors.items() if not name.startswith(_GENERATOR)})
        for place, generator in enumerate(self._generators()):
            generator.set_state(tensors[f"{_GENERATOR}.{place}"])
        try:
            self._begin_pass(number)
            yield
        finally:
            set_random_states(kept)

    def place(self) -> LoaderPlace:
        """Return where this loader stands, for `go_back`."""
        return LoaderPlace(self.state(), [generator.get_state() for generator in self._generators()])

    def go_back(self, place: LoaderPlace) -> bool:
        """Give again the batches that came after `place`; a loader that can be gone through only once goes on.

        Args:
            place: from this loader.

        Returns:
            Whether the pass after that of `place` has to be begun again, for which the global random states must be
            what they were then.
        """
        if place.state.facts == self.state().facts or is_one_shot(self._loader):
            return False
        has_begun_another = self._pass != place.state.facts["pass"]
        self._pass, self._batches, self._samples, self._iterator = -1, 0, 0, iter(())
        self.load_state(*place.state)
        for generator, state in zip(self._generators(), place.generators, strict=True):
            generator.set_state(state)
        return has_begun_another

    def _count(self, batch: Mapping[str, Any], key: str | None = None) -> None:
        """Take note of a batch that is given; its rows are those of `key`, or of whatever is first."""
        if not isinstance(batch, Mapping) or not batch or (key is not None and key not in batch):
            held = ", ".join(map(repr, batch)) if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
            raise DataError(
                f"{self._what} gives batches as mappings by name{f' with {key!r}' if key else ''}, but this one is "
                f"{held or 'empty'}; look at its collate_fn"
            )
        self._batches += 1
        self._samples += len(batch[key] if key is not None else next(iter(batch.values())))

    def _once_only(self) -> DataError:
        return DataError(
            f"{self._what} is an iterator that has come to its end and cannot be iterated again; give a list or a "
            "DataLoader, which begins anew with each pass"
        )

    def _begin_pass(self, number: int) -> None:
        if self._iterated and is_one_shot(self._loader):
            raise self._once_only()
        self._iterated = True
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


def progress_of_all(facts: Sequence[Mapping[str, int]]) -> LoaderProgress:
    """Return how far ranks were together, from where each one's loader stood."""
    number = max(each["pass"] for each in facts)
    there = [each for each in facts if each["pass"] == number]  # the others are about to begin it
    spare = sum(-(-each["samples"] // each["batches"]) for each in there if each["batches"])
    return LoaderProgress(number, sum(each["samples"] for each in there), spare)


def is_one_shot(loader: Batches) -> bool:
    """Whether the loader is an iterator: it gives itself, wherever it stands, and no pass beyond this one."""
    return isinstance(loader, Iterator)

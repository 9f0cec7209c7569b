"""The makers' data loader as one line of batches, of which any maker can make any, again and again the same."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from rlhf_core.coati.prompt_batches import NumberedPrompts, PromptNumbers, prompts_of
from rlhf_core.counting import counted
from rlhf_core.errors import DataError
from rlhf_core.strategy.ranks import ALONE
from rlhf_core.training.loaders import Batches, CycledLoader
from rlhf_core.training.modes import random_states, set_random_states
from rlhf_core.types import Prompt

_KEPT_BATCHES = 64
"""So many batches before the episode's first stay in memory; an earlier one is read again from the line's beginning."""


@dataclass(frozen=True, slots=True)
class LoaderChunk:
    """One batch of the makers' loader: what is leased is its place, not its content."""

    episode: int
    index: int
    """Place in the episode, from 0."""
    position: int
    """Place in the line, from 0; behind the loader's last batch comes its first again."""
    rows: int
    """Samples that are made of it."""


class FirstBatch(NamedTuple):
    """What tells two loaders apart before anything is made."""

    digest: str
    rows: int
    """Samples that are made of it."""


class LoaderLine:
    """The batches of one loader, pass after pass, by their place in the line.

    Whatever shuffles draws from random states that the seed and the place decide, so that every process sees one order.

    Args:
        dataloader_fn: builds the loader; called again where an earlier batch is asked for than is in memory.
        tokenizer: gives prompts' texts.
        samples_per_prompt: responses of each row of a batch.
        seed: of the run.
        vocabulary: tokens that the actor knows; None looks at none.
    """

    def __init__(
        self,
        dataloader_fn: Callable[[], Batches],
        *,
        tokenizer: Any,
        samples_per_prompt: int,
        seed: int,
        vocabulary: int | None = None,
    ) -> None:
        self._dataloader_fn = dataloader_fn
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._samples_per_prompt, self._seed = samples_per_prompt, seed
        self._numbers = PromptNumbers(samples_per_prompt, ALONE)
        self._numbered = (-1, 0)
        """The episode whose prompts were numbered last, and how many of its batches."""
        self._begin()

    @property
    def batches(self) -> int | None:
        """Batches of a pass; None if the loader does not say."""
        return len(self._loader) if isinstance(self._loader, Sized) else None

    def first(self) -> FirstBatch:
        """Return what the first batch is known by.

        Raises:
            DataError: if there is none, or it is none of prompts.
        """
        prompts = self._prompts(0)
        body = repr([(prompt.ids, prompt.key, prompt.answer) for prompt in prompts])
        digest = hashlib.sha256(body.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return FirstBatch(digest, len(prompts) * self._samples_per_prompt)

    def read(self, unit: LoaderChunk) -> NumberedPrompts:
        """Return a unit's rows, numbered as one process would that makes the whole episode.

        After an error the loader is read anew: it may have gone on without having given its batch.

        Raises:
            DataError: if the batch gives another number of samples than the unit says, or is none of prompts.
        """
        try:
            return self._numbered_rows(unit)
        except BaseException:
            self._is_spoilt = True
            raise

    def _numbered_rows(self, unit: LoaderChunk) -> NumberedPrompts:
        episode, done = (-1, 0) if self._is_spoilt else self._numbered
        if episode != unit.episode or done > unit.index:
            self._numbers.begin_episode()
            done = 0
        first = unit.position - unit.index
        for position in range(first + done, unit.position):
            self._numbers.number(self._prompts(position))
        numbered = self._numbers.number(self._prompts(unit.position))
        self._numbered = (unit.episode, unit.index + 1)
        self._forget_before(first - _KEPT_BATCHES)
        if len(numbered.prompts) != unit.rows:
            raise DataError(
                f"batch {unit.position} of the makers' dataloader gives {counted(len(numbered.prompts), 'sample')}, "
                f"but the first gives {unit.rows}; leave out a last batch that is smaller (drop_last=True)"
            )
        return numbered

    def _begin(self) -> None:
        self._is_spoilt = False
        with _random_states_of(self._seed, -1):
            self._loader = self._dataloader_fn()
        self._cycled = CycledLoader(self._loader, what="the makers' dataloader")
        self._next = 0
        self._read: dict[int, list[Prompt]] = {}

    def _prompts(self, position: int) -> list[Prompt]:
        if self._is_spoilt or (position < self._next and position not in self._read):
            self._begin()
        while self._next <= position:
            with _random_states_of(self._seed, self._next):
                batch = self._cycled.next()
            self._read[self._next] = prompts_of(batch, self._tokenizer, vocabulary=self._vocabulary)
            self._next += 1
        return self._read[position]

    def _forget_before(self, position: int) -> None:
        for known in [known for known in self._read if known < position]:
            del self._read[known]


class _random_states_of:  # noqa: N801 - a context
    """Runs a block with random states that a seed and a place decide, and leaves those of the process as they were."""

    def __init__(self, seed: int, place: int) -> None:
        self._words = hashlib.sha256(f"{seed}/{place}".encode()).digest()

    def __enter__(self) -> None:
        self._kept = random_states()
        number = int.from_bytes(self._words[:4], "little")
        random.seed(number)
        np.random.seed(number)
        torch.manual_seed(number)

    def __exit__(self, *_: object) -> None:
        set_random_states(self._kept)

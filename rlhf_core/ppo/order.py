"""Which samples make up which minibatch: one module for every topology."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_core.types import Experience, Sample

Rows = NDArray[np.int64]


class Window(NamedTuple):
    """The samples of one optimizer step."""

    rows: Rows
    batches: int
    """Training batches that it is made of."""
    begins: tuple[int, ...]
    """Passes whose first batch is in it."""
    ends: tuple[int, ...]
    """Passes whose last batch is in it."""


def in_key_order(batches: Iterable[tuple[Experience, Sequence[Sample]]]) -> Experience:
    """Return the rows of several batches as one experience, in the order of their samples' keys.

    Whoever made a row, and whenever, then decides nothing. Rows of equal key keep the order in which they came; without
    samples, a batch's rows come before all that have a key.

    Args:
        batches: at least one row in all; each with its rows as text, or with none.
    """
    rows: list[tuple[tuple[str, int], Experience]] = []
    for experience, samples in batches:
        keys = [(sample.key, sample.index) for sample in samples] or [("", 0)] * len(experience)
        rows += zip(keys, experience.split(1), strict=True)
    return Experience.concat([row for _, row in sorted(rows, key=lambda each: each[0])])


def minibatch_order(*, seed: int, episode: int, epoch: int, samples: int, batch_size: int) -> list[Rows]:
    """Return the rows of each minibatch of one pass over an episode's samples.

    The first pass takes the samples in their order, so that it needs no luck to be repeated; later ones permute
    them by a generator keyed by (seed, episode, epoch), so that they depend on nothing that happened before.

    Args:
        seed: seed of the run, at least 0.
        episode: from 0.
        epoch: pass over the episode, from 0.
        samples: rows of the episode.
        batch_size: rows of a minibatch; the last one has what is left.
    """
    rows = np.arange(samples, dtype=np.int64)
    if epoch > 0:
        rows = np.random.default_rng([seed, episode, epoch]).permutation(rows)
    return [rows[start : start + batch_size] for start in range(0, samples, batch_size)]


def drawn_rows(*, seed: int, episode: int, draw: int, samples: int, batch_size: int) -> Rows:
    """Return the rows of one random batch, without replacement: all rows, permuted, if there are no more.

    Args:
        seed: seed of the run, at least 0.
        episode: from 0.
        draw: number of the batch in its episode, from 0; batches of different numbers may share rows.
        samples: rows of the episode.
        batch_size: rows of the batch.
    """
    # The last key keeps these numbers apart from the permutations of `minibatch_order`.
    generator = np.random.default_rng([seed, episode, draw, 1])
    return generator.permutation(samples)[:batch_size].astype(np.int64)


def episode_windows(
    *, seed: int, episode: int, passes: int, samples: int, batch_size: int, accumulation_steps: int, sampled: bool
) -> list[Window]:
    """Return what each optimizer step of an episode learns from.

    The batches of all passes stand in one line, and each step takes the next `accumulation_steps` of them: a step
    may end one pass and begin the next, and the last one has what is left.

    Args:
        seed: seed of the run, at least 0.
        episode: from 0.
        passes: passes over the samples, or batches drawn at random.
        samples: rows of the episode.
        batch_size: rows of a training batch.
        accumulation_steps: training batches of a step.
        sampled: draw one random batch in each pass instead of going through all samples.
    """
    batches: list[tuple[int, Rows, bool, bool]] = []
    for number in range(passes):
        if sampled:
            rows = drawn_rows(seed=seed, episode=episode, draw=number, samples=samples, batch_size=batch_size)
            order = [rows]
        else:
            order = minibatch_order(seed=seed, episode=episode, epoch=number, samples=samples, batch_size=batch_size)
        last = len(order) - 1
        batches += [(number, rows, place == 0, place == last) for place, rows in enumerate(order)]
    lines = [batches[start : start + accumulation_steps] for start in range(0, len(batches), accumulation_steps)]
    return [
        Window(
            rows=np.concatenate([rows for _, rows, _, _ in line]),
            batches=len(line),
            begins=tuple(number for number, _, is_first, _ in line if is_first),
            ends=tuple(number for number, _, _, is_last in line if is_last),
        )
        for line in lines
    ]

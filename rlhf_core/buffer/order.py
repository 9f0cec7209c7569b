"""Which samples make up which minibatch: one function for every topology."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def minibatch_order(*, seed: int, episode: int, epoch: int, samples: int, batch_size: int) -> list[NDArray[np.int64]]:
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

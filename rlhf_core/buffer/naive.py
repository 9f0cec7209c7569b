"""Holds experience in one process until it has been learnt from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rlhf_core.buffer.order import minibatch_order
from rlhf_core.types import Experience, Sample


class _Row(NamedTuple):
    key: tuple[str, int]
    experience: Experience


class NaiveExperienceBuffer:
    """Releases samples in the order of their keys, whatever order they came in.

    Args:
        sample_batch_size: samples of a minibatch.
        limit: batches that are kept, the oldest arrivals being dropped; 0 keeps all.
    """

    def __init__(self, sample_batch_size: int, limit: int = 0) -> None:
        self.sample_batch_size = sample_batch_size
        self.limit = limit
        self._rows: list[_Row] = []

    def __len__(self) -> int:
        """Return the number of samples held."""
        return len(self._rows)

    @property
    def is_full(self) -> bool:
        """Whether the next arrival drops the oldest."""
        return self.limit > 0 and len(self) >= self.limit * self.sample_batch_size

    def append(self, experience: Experience, samples: Sequence[Sample]) -> None:
        """Take in one batch.

        Args:
            experience: the batch; its tensors are kept, not copied.
            samples: the same rows as text; their key and index order what is released.

        Raises:
            ValueError: if the two differ in length.
        """
        if len(experience) != len(samples):
            raise ValueError(f"expected a sample for each of {len(experience)} rows of experience, got {len(samples)}")
        for sample, row in zip(samples, experience.split(1), strict=True):
            self._rows.append(_Row((sample.key, sample.index), row))
        if self.limit > 0:
            del self._rows[: -self.limit * self.sample_batch_size]

    def extend(self, batches: Sequence[tuple[Experience, Sequence[Sample]]]) -> None:
        """Take in several batches, one after the other."""
        for experience, samples in batches:
            self.append(experience, samples)

    def collect(self) -> Experience:
        """Return everything held as one experience, in the order of the samples' keys.

        Raises:
            ValueError: if nothing is held.
        """
        # Rows of equal key (a prompt that came twice) keep their order of arrival.
        ordered = sorted(self._rows, key=lambda row: row.key)
        return Experience.concat([row.experience for row in ordered])

    def minibatches(self, *, seed: int, episode: int, epochs: int) -> Iterator[Experience]:
        """Yield the minibatches of `epochs` passes, as `minibatch_order` says."""
        experience = self.collect()
        for epoch in range(epochs):
            for rows in minibatch_order(
                seed=seed,
                episode=episode,
                epoch=epoch,
                samples=len(self),
                batch_size=self.sample_batch_size,
            ):
                yield experience.select(rows)

    def clear(self) -> None:
        """Throw everything away."""
        self._rows.clear()

"""Holds experience in one process until it has been learnt from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlhf_core.errors import ConfigError
from rlhf_core.ppo.order import drawn_rows
from rlhf_core.types import Experience, Sample


def check_sizes(sample_batch_size: int, limit: int) -> None:
    """See that a buffer can hand out batches and hold something.

    Args:
        sample_batch_size: samples of a batch.
        limit: of what may wait; 0 sets none.

    Raises:
        ConfigError: if a batch has less than one sample, or the limit is below 0.
    """
    if sample_batch_size < 1 or limit < 0:
        raise ConfigError(
            f"expected a buffer with sample_batch_size of at least 1 and limit of at least 0, got {sample_batch_size} "
            f"and {limit}"
        )


class _Row(NamedTuple):
    key: tuple[str, int]
    experience: Experience


class NaiveExperienceBuffer:
    """Releases samples in the order of their keys, whatever order they came in.

    Args:
        sample_batch_size: samples of a minibatch.
        limit: batches that are kept, the oldest arrivals being dropped; 0 keeps all.
        cpu_offload: keep everything in host memory; otherwise it stays on the device it came on.
        seed: of `sample`.

    Raises:
        ConfigError: if there is less than one sample in a minibatch, or the limit is below 0.
    """

    def __init__(self, sample_batch_size: int, limit: int = 0, cpu_offload: bool = True, *, seed: int = 0) -> None:
        check_sizes(sample_batch_size, limit)
        self.sample_batch_size = sample_batch_size
        self.limit = limit
        self.cpu_offload = cpu_offload
        self._seed = seed
        self._draws = 0
        self._rows: list[_Row] = []

    def __len__(self) -> int:
        """Return the number of samples held."""
        return len(self._rows)

    def __getitem__(self, index: int) -> Experience:
        """Return one sample, in the order of the keys, as an experience of one row."""
        return self._ordered()[index]

    def append(self, experience: Experience, samples: Sequence[Sample] = ()) -> None:
        """Take in one batch.

        Args:
            experience: the batch; its tensors are kept, not copied, unless they must leave their device.
            samples: the same rows as text; their key and index order what is released. Without them, rows
                are released in the order of their arrival, before all that have a key.

        Raises:
            ValueError: if there are samples, but not as many as rows.
        """
        if samples and len(experience) != len(samples):
            raise ValueError(f"expected a sample for each of {len(experience)} rows of experience, got {len(samples)}")
        kept = experience.replace()
        if self.cpu_offload:
            kept.to_device("cpu")
        keys = [(sample.key, sample.index) for sample in samples] or [("", 0)] * len(kept)
        self._rows += [_Row(key, row) for key, row in zip(keys, kept.split(1), strict=True)]
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
        return Experience.concat(self._ordered())

    def sample(self) -> Experience:
        """Return a batch drawn at random, without replacement; the next call draws another.

        Raises:
            ValueError: if nothing is held.
        """
        rows = drawn_rows(
            seed=self._seed, episode=0, draw=self._draws, samples=len(self), batch_size=self.sample_batch_size
        )
        self._draws += 1
        ordered = self._ordered()
        return self.collate_fn([ordered[row] for row in rows])

    @staticmethod
    def collate_fn(batch: Sequence[Experience]) -> Experience:
        """Return the items of a batch, as `__getitem__` gives them, as one experience, for a DataLoader."""
        return Experience.concat(batch)

    def clear(self) -> None:
        """Throw everything away."""
        self._rows.clear()

    def _ordered(self) -> list[Experience]:
        # Rows of equal key (a prompt that came twice) keep their order of arrival.
        return [row.experience for row in sorted(self._rows, key=lambda row: row.key)]

"""Experience on its way into a trainer: rows come in any number, and leave in batches, first in, first out."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from rlhf_core.coati.buffer import check_sizes
from rlhf_core.counting import counted
from rlhf_core.errors import RlhfError
from rlhf_core.types import Experience


class BufferTimeoutError(RlhfError):
    """Nothing came into a buffer, or nobody took anything out of it, in time."""


class DetachedReplayBuffer:
    """Batches that wait to be learnt from, in the trainer's own process.

    Whoever adds to a full buffer waits; whoever takes from an empty one waits; both no longer than they are told. Rows
    that do not fill a batch wait for more, and are never handed out alone. Every method may be called by any thread.

    Args:
        sample_batch_size: rows of a batch.
        limit: batches that may wait; 0 sets no limit.
        timeout_s: longest wait of `append` and `extend` for room, and of `sample` for a batch.

    Raises:
        ConfigError: if a batch has less than one row, or the limit is below 0.
    """

    def __init__(self, sample_batch_size: int, limit: int = 0, *, timeout_s: float = 600.0) -> None:
        check_sizes(sample_batch_size, limit)
        self.sample_batch_size = sample_batch_size
        self.limit = limit
        self._timeout_s = timeout_s
        self._rows: list[Experience] = []
        """Of one row each, too few for a batch."""
        self._batches: deque[Experience] = deque()
        self._changed = threading.Condition()
        self._turn = threading.Lock()
        """Of whoever adds: rows of two callers do not mix while one of them waits for room."""

    def append(self, experience: Experience) -> None:
        """Take in rows, on the CPU; wait while they make more batches than there is room for.

        Raises:
            BufferTimeoutError: if nobody makes room in time; the batches that fitted are in the buffer, the others not.
        """
        self.extend([experience])

    def extend(self, items: Iterable[Experience]) -> None:
        """Take in several, one after the other, as `append` does."""
        deadline = time.monotonic() + self._timeout_s
        rows = [row for item in items for row in _on_cpu(item).split(1)]
        if not self._turn.acquire(timeout=self._timeout_s):
            raise self._is_full(len(rows))
        try:
            with self._changed:
                while rows:
                    missing = self.sample_batch_size - len(self._rows)
                    if len(rows) >= missing and not self._wait(self._has_room, deadline):
                        raise self._is_full(len(rows))
                    missing = self.sample_batch_size - len(self._rows)  # clear() may have come meanwhile
                    self._rows, rows = self._rows + rows[:missing], rows[missing:]
                    if len(self._rows) == self.sample_batch_size:
                        self._batches.append(Experience.concat(self._rows))
                        self._rows = []
                        self._changed.notify_all()
        finally:
            self._turn.release()

    def sample(self, timeout_s: float | None = None) -> Experience:
        """Return the batch that has waited longest, and forget it; wait while there is none.

        Args:
            timeout_s: longest wait; None takes the buffer's.

        Raises:
            BufferTimeoutError: if none comes in time.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        with self._changed:
            if not self._wait(lambda: bool(self._batches), time.monotonic() + timeout_s):
                raise BufferTimeoutError(
                    f"waited {timeout_s:g} s for a batch of {counted(self.sample_batch_size, 'row')} in the replay "
                    f"buffer, which has {len(self._rows)}; is anybody left who sends experience?"
                )
            batch = self._batches.popleft()
            self._changed.notify_all()
            return batch

    def clear(self) -> None:
        """Throw everything away, rows that fill no batch too; whoever waits for room goes on."""
        with self._changed:
            self._batches.clear()
            self._rows = []
            self._changed.notify_all()

    def get_length(self) -> int:
        """Return the number of batches, not of rows, that wait."""
        with self._changed:
            return len(self._batches)

    @property
    def is_empty(self) -> bool:
        """Whether no row waits, not even one that fills no batch."""
        with self._changed:
            return not self._batches and not self._rows

    def waiting(self) -> list[Experience]:
        """Return what waits: the batches, and the rows that fill none, in order."""
        with self._changed:
            return [*self._batches, *self._rows]

    def restore(self, waiting: Iterable[Experience]) -> None:
        """Hold what `waiting` of a buffer of the same batches returned, and nothing else."""
        with self._changed:
            self._batches.clear()
            self._rows = []
            for each in waiting:
                (self._batches if len(each) == self.sample_batch_size else self._rows).append(each)
            self._changed.notify_all()

    def _has_room(self) -> bool:
        return not self.limit or len(self._batches) < self.limit

    def _wait(self, is_so: Callable[[], bool], deadline: float) -> bool:
        return self._changed.wait_for(is_so, timeout=max(0.0, deadline - time.monotonic()))

    def _is_full(self, rows: int) -> BufferTimeoutError:
        return BufferTimeoutError(
            f"waited {self._timeout_s:g} s for room for {counted(rows, 'more row')} in the replay buffer, which holds "
            f"its limit of {counted(self.limit, 'batch', 'batches')} of {self.sample_batch_size}; does the trainer "
            "still learn?"
        )


def _on_cpu(experience: Experience) -> Experience:
    kept = experience.replace()
    kept.to_device("cpu")
    return kept

"""Where a fit's experience comes from: made by makers, pushed into a buffer, or gathered by another rank."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

from rlhf_core.coati.detached.loader_line import LoaderChunk
from rlhf_core.coati.detached.replay_buffer import DetachedReplayBuffer
from rlhf_core.counting import ordinal
from rlhf_core.errors import LostRankError, RlhfError
from rlhf_core.ppo.metrics import staleness
from rlhf_core.ray_tools.calls import wait_for
from rlhf_core.rollout.lease_queue import LeaseQueue
from rlhf_core.rollout.samples import MadeChunk
from rlhf_core.rollout.scheduler import Scheduler
from rlhf_core.types import Experience, Sample

_POLL_S = 0.1


class Batch(NamedTuple):
    """Rows that came together."""

    experience: Experience
    samples: Sequence[Sample]
    """The same rows as text; none where nobody sent them."""


class Source(ABC):
    """Experience of one fit."""

    is_shared = False
    """Whether every rank is given all rows of an episode; else each is given rows of its own."""

    @abstractmethod
    def episode(self, episode: int, batches: int) -> Iterator[Batch]:
        """Yield an episode's experience, as it comes.

        Args:
            episode: from 0.
            batches: of this trainer's size that the episode learns from.
        """

    def learnt(self, episode: int) -> None:  # noqa: B027 - what is pushed waits for nothing
        """Take note that an episode is learnt, and its weights are sent."""

    def figures(self) -> Mapping[str, float]:
        """Return what is known of queue and makers."""
        return {}

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Nothing more will be taken."""


class PushedExperience(Source):
    """What somebody puts into this trainer's buffer, first in, first out.

    Args:
        buffer: the trainer's.
        timeout_s: longest wait for one batch.
    """

    def __init__(self, buffer: DetachedReplayBuffer, timeout_s: float) -> None:
        self._buffer, self._timeout_s = buffer, timeout_s

    def episode(self, episode: int, batches: int) -> Iterator[Batch]:  # noqa: ARG002 - in the order of arrival
        """Yield batch after batch."""
        for _ in range(batches):
            yield Batch(self._buffer.sample(self._timeout_s), ())

    def figures(self) -> Mapping[str, float]:
        """Return how many samples wait."""
        return {"queue_depth": float(self._buffer.get_length() * self._buffer.sample_batch_size)}


class ScheduledExperience(Source):
    """What makers make of the units that they lease, in the order of the units.

    Args:
        queue: of the fit.
        scheduler: drives the makers; started and stopped with this.
        version: returns the version of the weights that were sent last.
        timeout_s: longest wait for an episode.
        is_shared: whether other ranks are given the same rows.
    """

    def __init__(
        self,
        queue: LeaseQueue[LoaderChunk, MadeChunk],
        scheduler: Scheduler[LoaderChunk, MadeChunk],
        *,
        version: Callable[[], int],
        timeout_s: float,
        is_shared: bool = False,
    ) -> None:
        self.queue, self.scheduler = queue, scheduler
        self._version, self._timeout_s = version, timeout_s
        self._staleness = {"staleness": 0.0, "staleness_max": 0.0}
        self._waited_s = self._makers_idle_s = self._idle_before = 0.0
        self.is_shared = is_shared
        scheduler.start()

    def episode(self, episode: int, batches: int) -> Iterator[Batch]:  # noqa: ARG002 - the queue knows its units
        """Wait until the whole episode is made, then yield unit after unit."""
        started, version = time.perf_counter(), self._version()
        found = self.queue.collect(
            episode, version=version, timeout_s=self._timeout_s, on_progress=lambda _done, _all: None
        )
        self._waited_s = time.perf_counter() - started
        self._staleness = staleness(torch.tensor([made.version for made in found]), learnt_at=version)
        for made in found:
            yield Batch(Experience.from_numpy(made.result.experience), made.result.samples)

    def learnt(self, episode: int) -> None:
        """Open what waited for this episode's weights."""
        idle = sum(self.scheduler.idle_seconds.values()) / max(len(self.scheduler.idle_seconds), 1)
        self._makers_idle_s, self._idle_before = idle - self._idle_before, idle
        self.queue.learnt(episode)

    def figures(self) -> Mapping[str, float]:
        """Return the last episode's staleness, samples that wait, and how long either side had nothing to do in it."""
        return {
            **self._staleness,
            "queue_depth": float(self.queue.samples_waiting),
            "trainer_idle_s": self._waited_s,
            "makers_idle_s": self._makers_idle_s,
            "revivals": float(self.scheduler.revivals),
        } | {f"chunks/{name}": float(count) for name, count in self.queue.counts()._asdict().items()}

    def close(self) -> None:
        """Lease nothing more."""
        self.scheduler.stop()


class FirstRanksExperience(Source):
    """What the first rank of this trainer's group has gathered: asked for again and again, never for long.

    Args:
        first: handle of the first rank's actor.
        who: the first rank, in words.
        timeout_s: longest wait for an episode.
    """

    is_shared = True

    def __init__(self, first: Any, who: str, timeout_s: float) -> None:
        self._first, self._who, self._timeout_s = first, who, timeout_s

    def episode(self, episode: int, batches: int) -> Iterator[Batch]:  # noqa: ARG002 - the first rank knows
        """Wait until the first rank has all of an episode, and yield it as one."""
        yield Batch(Experience.from_numpy(self._fetched(episode)), ())

    def _fetched(self, episode: int) -> Any:
        deadline = time.monotonic() + self._timeout_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                (found,) = wait_for(
                    {self._first.gathered_episode.remote(episode): self._who},
                    max(left_s, 1.0),
                    late=lambda _: self._late(episode),
                    failed=lambda *_: None,
                )
                if found.trouble:
                    raise RlhfError(f"{self._who} has ended its fit: {found.trouble}")
                if found.references:
                    return ray.get(found.references[0], timeout=max(left_s, 1.0))
            except ActorUnavailableError:  # not dead, or not yet: it is asked again
                pass
            except RayActorError as error:
                raise LostRankError(f"{self._who} has ended: {str(error).splitlines()[0]}") from error
            except GetTimeoutError as error:
                raise self._late(episode) from error
            if left_s <= 0:
                raise self._late(episode)
            time.sleep(_POLL_S)

    def _late(self, episode: int) -> TimeoutError:
        return TimeoutError(
            f"waited {self._timeout_s:.0f} s for the experience of episode {ordinal(episode)} from {self._who}, and "
            "none came; does its fit run, and do its makers work?"
        )

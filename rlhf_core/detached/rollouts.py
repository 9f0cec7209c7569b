"""Who makes a run's experience: an episode's chunks, their schedule and controls, and what a state keeps of them.

A chunk is a fixed list of samples, generated and scored whole by one maker.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_core.config import PPOConfig
from rlhf_core.data import Problem
from rlhf_core.ppo.controls import ControlsByEpisode, RewardControls
from rlhf_core.ppo.state import RolloutState
from rlhf_core.rollout.lease_queue import LeaseQueue, Made
from rlhf_core.rollout.samples import MadeChunk
from rlhf_core.rollout.scheduler import Published, Scheduler, Waits
from rlhf_core.types import EpisodeControls


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompts of one episode that go to one maker; the same whatever the number of makers."""

    episode: int
    index: int
    """Place in the episode, from 0: experience is learnt from in this order."""
    problems: tuple[Problem, ...]
    """One entry per sample: a prompt of several samples stands here several times, in a row."""
    samples: tuple[int, ...]
    """Number of each sample among those of its prompt in this episode, from 0; decides the noise it is drawn with."""

    @property
    def rows(self) -> int:
        """Samples that come of it."""
        return len(self.samples)


def episode_problems(problems: Sequence[Problem], config: PPOConfig, *, seed: int, episode: int) -> list[Problem]:
    """Return the prompts of one episode: passes over all problems, each pass in its own seeded order.

    A prompt comes again only when every other one has come as often.
    """
    wanted, count = config.prompts_per_episode, len(problems)
    start = episode * wanted
    picked: list[Problem] = []
    for epoch in range(start // count, -(-(start + wanted) // count)):
        order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(count)
        first = epoch * count
        picked += [problems[int(place)] for place in order[max(start - first, 0) : start + wanted - first]]
    return picked


def make_chunks(problems: Sequence[Problem], config: PPOConfig, *, episode: int) -> list[Chunk]:
    """Cut an episode's prompts into chunks of `config.chunk_size` samples, a prompt's samples together.

    A prompt that comes twice in an episode goes on counting its samples, so that none is drawn twice.
    """
    count = config.samples_per_prompt
    times: Counter[str] = Counter()
    rows: list[tuple[Problem, int]] = []
    for problem in problems:
        first = times[problem.key] * count
        times[problem.key] += 1
        rows += [(problem, first + sample) for sample in range(count)]
    size = config.chunk_size
    return [
        Chunk(
            episode=episode,
            index=index,
            problems=tuple(problem for problem, _ in rows[start : start + size]),
            samples=tuple(sample for _, sample in rows[start : start + size]),
        )
        for index, start in enumerate(range(0, len(rows), size))
    ]


class Rollouts:
    """The counts and the scheduler of one run, from where it stands.

    Args:
        problems: prompts of the run, in a fixed order.
        config: the run's configuration.
        seed: of the run.
        controls: what the next episode's rewards are made with, as the trainer keeps it.
        completed: episodes that are learnt.
        kept: what a training state says of the makers' work.
        lends: as for `Scheduler`.
        on_trouble: is told what is wrong with a maker.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        config: PPOConfig,
        *,
        seed: int,
        controls: RewardControls,
        completed: int,
        kept: RolloutState,
        lends: Callable[[], tuple[Any, ...]] = tuple,
        on_trouble: Callable[[str], None],
    ) -> None:
        self._problems, self._config, self._seed = problems, config, seed
        self._controls = ControlsByEpisode(
            controls, max_staleness=config.max_staleness, completed=completed, kept=kept.controls
        )
        limit = config.buffer_limit * config.train_batch_size * config.dp
        self.queue: LeaseQueue[Chunk, MadeChunk] = LeaseQueue(
            self._chunks,
            episodes=config.episodes,
            completed=completed,
            max_staleness=config.max_staleness,
            stale_samples=config.stale_samples,
            limit=limit,
        )
        if kept.counts:
            self.queue.restore(kept.counts, self._as_made(kept.waiting))
        cluster = config.cluster
        self.scheduler: Scheduler[Chunk, MadeChunk] = Scheduler(
            self.queue,
            controls=self._controls.of,
            lends=lends,
            waits=Waits(start_s=cluster.start_timeout_s, chunk_s=cluster.episode_timeout_s),
            on_trouble=on_trouble,
        )
        self._depth = self._makers = self._revivals = 0
        self._looked, self._idle_s = time.monotonic(), 0.0
        """Of the last look: when it was, and how long all makers had been idle by then."""

    def controls_of(self, episode: int) -> EpisodeControls:
        """Return what an episode's rewards are made with: from its first lease on, always the same."""
        return self._controls.of(episode)

    def collect(
        self, episode: int, on_progress: Callable[[int, int], None]
    ) -> tuple[list[MadeChunk], dict[str, float]]:
        """Wait for an episode's chunks; return them in order, and the wait as shared out over generate and score.

        Raises:
            MakersLostError: no maker is left, or it took longer than `cluster.episode_timeout_s`.
        """
        started = time.monotonic()
        self._depth = self.queue.samples_waiting
        timeout_s = self._config.cluster.episode_timeout_s
        found = self.queue.collect(episode, version=episode, timeout_s=timeout_s, on_progress=on_progress)
        made = [each.result for each in found]
        self._makers = len({chunk.maker for chunk in made})
        wait_s = time.monotonic() - started
        work = {phase: sum(chunk.seconds[phase] for chunk in made) for phase in ("generate", "score")}
        total = sum(work.values()) or 1.0
        # Makers work side by side, and beside the learner: the wait is shared out in proportion to their work.
        return made, {phase: wait_s * seconds / total for phase, seconds in work.items()}

    def publish(self, publication: Published, *, completed: int | None) -> float:
        """Have the makers take new weights; in lockstep, wait until they have. Returns the seconds of that wait.

        Args:
            publication: of the weights.
            completed: episodes that are learnt with it; None where the run begins or goes on.
        """
        if completed is not None:
            self._controls.open(completed)
        self.scheduler.publish(publication, completed=completed)
        started = time.monotonic()
        if completed is None or self._config.max_staleness == 0:
            self.scheduler.await_taken(publication.version, self._config.cluster.start_timeout_s)
        if completed is None:
            self.figures(busy_s=0.0)  # the time until here belongs to no episode
        return time.monotonic() - started

    def figures(self, *, busy_s: float) -> dict[str, float]:
        """Return how busy both sides were since the last call, and the counts.

        Args:
            busy_s: time in which the trainer did something else than wait.
        """
        now = time.monotonic()
        wall, self._looked = max(now - self._looked, 1e-9), now
        idle = self.scheduler.idle_seconds
        idle_s, self._idle_s = sum(idle.values()) - self._idle_s, sum(idle.values())
        counts, revivals = self.queue.counts()._asdict(), self.scheduler.revivals
        figures = {
            "queue_depth": float(self._depth),
            "idle_trainer": max(0.0, 1 - busy_s / wall),
            "idle_makers": idle_s / (max(1, len(idle)) * wall),
            "makers": float(self._makers),
            "revivals": float(revivals - self._revivals),
            **{f"chunks_{name}": float(number) for name, number in counts.items()},
        }
        self._revivals = revivals
        return figures

    def state(self) -> RolloutState:
        """Return what a training state keeps: nothing is copied, since nothing of it is ever changed.

        A chunk in which a call of a judge failed is made again after a restart: the judge may be back by then.
        """
        counts, waiting = self.queue.state()
        made = (each.result for each in waiting)
        judged = tuple(chunk for chunk in made if not any(sample.failures for sample in chunk.samples))
        return RolloutState(counts, self._controls.known(), judged)

    def _chunks(self, episode: int) -> list[Chunk]:
        problems = episode_problems(self._problems, self._config, seed=self._seed, episode=episode)
        return make_chunks(problems, self._config, episode=episode)

    def _as_made(self, waiting: Sequence[MadeChunk]) -> list[Made[Chunk, MadeChunk]]:
        found: dict[int, Any] = {}
        for chunk in waiting:
            if chunk.episode not in found:
                found[chunk.episode] = self._chunks(chunk.episode)
        return [Made(found[chunk.episode][chunk.index], chunk.version, chunk) for chunk in waiting]

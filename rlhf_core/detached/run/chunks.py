"""The unit of work: a fixed list of samples, generated and scored whole by one maker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhf_core.config import PPOConfig
from rlhf_core.data import Problem


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

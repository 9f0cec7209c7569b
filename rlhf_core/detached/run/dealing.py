"""What a run deals to its makers: an episode's chunks, their controls, and what a training state keeps of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_core.config import PPOConfig
from rlhf_core.data import Problem
from rlhf_core.detached.dealing.books import Made
from rlhf_core.detached.dealing.dealer import Dealer, Published, Waits
from rlhf_core.detached.dealing.ledger import Ledger
from rlhf_core.detached.maker import MadeChunk
from rlhf_core.detached.run.chunks import Chunk, episode_problems, make_chunks
from rlhf_core.detached.run.state import DealingState
from rlhf_core.trainer.ppo.controls import RewardControls
from rlhf_core.types import EpisodeControls


class Dealing:
    """The books and the dealer of one run, from where it stands.

    An episode's controls are set when makers may first begin it: in `wait` mode after `episode - max_staleness`
    episodes are learnt, whatever the makers' speed. All its chunks are made with them, also those made again.

    Args:
        problems: prompts of the run, in a fixed order.
        config: the run's configuration.
        seed: of the run.
        controls: what the next episode's rewards are made with, as the trainer keeps it.
        completed: episodes that are learnt.
        kept: what a training state says of the makers' work.
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
        kept: DealingState,
        on_trouble: Callable[[str], None],
    ) -> None:
        self._problems, self._config, self._seed = problems, config, seed
        self._reward_controls = controls
        self._controls = dict(kept.controls)
        limit = config.buffer_limit * config.train_batch_size * config.num_trainers
        self.ledger: Ledger[Chunk, MadeChunk] = Ledger(
            self._chunks,
            episodes=config.episodes,
            completed=completed,
            max_staleness=config.max_staleness,
            stale_samples=config.stale_samples,
            limit=limit,
        )
        if kept.books:
            self.ledger.restore(kept.books, self._as_made(kept.waiting))
        self._open(completed)
        cluster = config.cluster
        self.dealer: Dealer[Chunk, MadeChunk] = Dealer(
            self.ledger,
            controls=self.controls_of,
            waits=Waits(start_s=cluster.start_timeout_s, chunk_s=cluster.episode_timeout_s),
            on_trouble=on_trouble,
        )
        self._depth = self._makers = self._revivals = 0
        self._looked, self._idle_s = time.monotonic(), 0.0
        """Of the last look: when it was, and how long all makers had been idle by then."""

    def controls_of(self, episode: int) -> EpisodeControls:
        """Return what an episode's rewards are made with: from its first lease on, always the same."""
        return self._controls.setdefault(episode, self._reward_controls.current())

    def collect(
        self, episode: int, on_progress: Callable[[int, int], None]
    ) -> tuple[list[MadeChunk], dict[str, float]]:
        """Wait for an episode's chunks; return them in order, and the wait as shared out over generate and score.

        Raises:
            MakersLostError: no maker is left, or it took longer than `cluster.episode_timeout_s`.
        """
        started = time.monotonic()
        self._depth = self.ledger.samples_waiting
        timeout_s = self._config.cluster.episode_timeout_s
        found = self.ledger.collect(episode, version=episode, timeout_s=timeout_s, on_progress=on_progress)
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
            self._open(completed)
        self.dealer.publish(publication, completed=completed)
        started = time.monotonic()
        if completed is None or self._config.max_staleness == 0:
            self.dealer.await_taken(publication.version, self._config.cluster.start_timeout_s)
        if completed is None:
            self.figures(busy_s=0.0)  # the time until here belongs to no episode
        return time.monotonic() - started

    def figures(self, *, busy_s: float) -> dict[str, float]:
        """Return how busy both sides were since the last call, and the books.

        Args:
            busy_s: time in which the trainer did something else than wait.
        """
        now = time.monotonic()
        wall, self._looked = max(now - self._looked, 1e-9), now
        idle = self.dealer.idle_seconds
        idle_s, self._idle_s = sum(idle.values()) - self._idle_s, sum(idle.values())
        books, revivals = self.ledger.books()._asdict(), self.dealer.revivals
        figures = {
            "queue_depth": float(self._depth),
            "idle_trainer": max(0.0, 1 - busy_s / wall),
            "idle_makers": idle_s / (max(1, len(idle)) * wall),
            "makers": float(self._makers),
            "revivals": float(revivals - self._revivals),
            **{f"chunks_{name}": float(number) for name, number in books.items()},
        }
        self._revivals = revivals
        return figures

    def state(self) -> DealingState:
        """Return what a training state keeps: nothing is copied, since nothing of it is ever changed."""
        books, waiting = self.ledger.state()
        return DealingState(books, dict(self._controls), tuple(made.result for made in waiting))

    def _open(self, completed: int) -> None:
        """Set the controls of the episodes that makers may begin once so many are completed."""
        for done in [episode for episode in list(self._controls) if episode < completed]:
            del self._controls[done]
        for episode in range(completed, completed + self._config.max_staleness + 1):
            self.controls_of(episode)

    def _chunks(self, episode: int) -> list[Chunk]:
        problems = episode_problems(self._problems, self._config, seed=self._seed, episode=episode)
        return make_chunks(problems, self._config, episode=episode)

    def _as_made(self, waiting: Sequence[MadeChunk]) -> list[Made[Chunk, MadeChunk]]:
        found: dict[int, Any] = {}
        for chunk in waiting:
            if chunk.episode not in found:
                found[chunk.episode] = self._chunks(chunk.episode)
        return [Made(found[chunk.episode][chunk.index], chunk.version, chunk) for chunk in waiting]

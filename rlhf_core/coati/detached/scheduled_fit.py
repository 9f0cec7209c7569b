"""A fit's lease queue and scheduler: which of the makers' batches an episode learns from, and how makers begin."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rlhf_core.coati.detached.loader_line import LoaderChunk
from rlhf_core.coati.detached.sources import ScheduledExperience
from rlhf_core.coati.detached.weight_sender import OwnWeights, Transport, WeightSender
from rlhf_core.errors import ConfigError
from rlhf_core.rollout.lease_queue import LeaseQueue, Stale
from rlhf_core.rollout.samples import MadeChunk
from rlhf_core.rollout.scheduler import Scheduler, Waits
from rlhf_core.types import EpisodeControls

logger = logging.getLogger(__name__)
PublishedDtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class DealingOptions:
    """How a trainer and its makers wait for each other: what coati has no parameters for."""

    seed: int = 0
    """Of the order of batches after the first epoch."""
    max_staleness: int = 0
    """Updates of the makers' weights that may lie between sampling and learning; 0 is lockstep."""
    stale_samples: Stale = "wait"
    """Make nothing that could become too old, or make on, drop what did, and make it again; that needs a limit."""
    transport: Transport = "auto"
    """How weights travel."""
    rollout_dtype: PublishedDtype = "float32"
    """That `send_models` casts weights to; `DetachedPPOTrainer` takes that of its options instead."""
    start_timeout_s: float = 600.0
    """Longest wait for the makers: to be there, to build, to begin, and to take weights."""
    experience_timeout_s: float = 1800.0
    """Longest wait for an episode's experience, for one batch, and for room in the buffer."""
    answer_timeout_s: float = 30.0
    """Longest wait for a sign of life from a maker."""

    def __post_init__(self) -> None:
        """See that every value is one.

        Raises:
            ConfigError: if one is not; it is named.
        """
        for name, known in (("stale_samples", Stale), ("transport", Transport), ("rollout_dtype", PublishedDtype)):
            if getattr(self, name) not in get_args(known):
                expected = ", ".join(map(repr, get_args(known)))
                raise ConfigError(f"{name} is one of {expected}, not {getattr(self, name)!r}")
        if self.max_staleness < 0:
            raise ConfigError(f"max_staleness is a number of updates, at least 0, not {self.max_staleness}")
        if self.stale_samples == "drop" and self.max_staleness == 0:
            raise ConfigError("stale_samples 'drop' with max_staleness 0 drops all that is made ahead; take 'wait'")
        for name in ("start_timeout_s", "experience_timeout_s", "answer_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is a number of seconds above 0, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class ScheduledFit:
    """What the makers are to make for a fit."""

    first_episode: int
    """Of the fit: the makers' line begins with it."""
    completed: int
    """Episodes that are learnt."""
    episodes: int
    """After the fit."""
    units: int
    """Batches of the makers in an episode."""
    rows: int
    """Samples of each."""
    limit: int
    """Samples that may be made ahead; 0 sets none."""
    counts: Mapping[str, Any] | None
    """Of what was leased before; None begins them."""

    def units_of(self, episode: int) -> list[LoaderChunk]:
        """Return an episode's part of the makers' line."""
        first = (episode - self.first_episode) * self.units
        return [LoaderChunk(episode, index, first + index, self.rows) for index in range(self.units)]


def scheduled(
    fit: ScheduledFit,
    makers: Mapping[str, Any],
    options: DealingOptions,
    *,
    controls: Callable[[int], EpisodeControls | None],
    weights: WeightSender,
    is_shared: bool,
) -> ScheduledExperience:
    """Set the makers to work, and return what they make.

    Args:
        fit: what is to be made.
        makers: handles by name.
        options: how is waited, and what may become how old.
        controls: returns what an episode's rewards are made with.
        weights: that makers begin with, where some were sent, and whose version counts.
        is_shared: whether other ranks are given the same rows.

    Raises:
        ConfigError: if stale experience is to be dropped, and there is no limit.
    """
    if options.stale_samples == "drop" and not fit.limit:
        raise ConfigError("stale_samples 'drop' would make experience without end; give the trainer a buffer_limit")
    queue: LeaseQueue[LoaderChunk, MadeChunk] = LeaseQueue(
        fit.units_of,
        episodes=fit.episodes,
        completed=fit.completed,
        max_staleness=options.max_staleness,
        stale_samples=options.stale_samples,
        limit=fit.limit,
        timeout_setting="DealingOptions.experience_timeout_s",
    )
    if fit.counts is not None:
        queue.restore(fit.counts, ())
    waits = Waits(
        start_s=options.start_timeout_s,
        answer_s=options.answer_timeout_s,
        chunk_s=options.experience_timeout_s,
        start_setting="DealingOptions.start_timeout_s",
    )
    scheduler = Scheduler(queue, controls=controls, waits=waits, on_trouble=lambda said: logger.warning("%s", said))
    scheduler.publication = weights.last or OwnWeights(weights.version)
    for name, handle in makers.items():
        scheduler.add(name, handle)
    return ScheduledExperience(
        queue, scheduler, version=lambda: weights.version, timeout_s=options.experience_timeout_s, is_shared=is_shared
    )

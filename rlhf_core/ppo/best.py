"""Which episode of a run is kept, and when a run ends before its last one: both by the run's history alone.

So a run that was killed, whoever goes on with it, decides the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_core.counting import ordinal

if TYPE_CHECKING:
    from rlhf_core.config import PPOConfig

DEVELOPMENT = "development"
"""Figure of a measured episode: the share of the development split that is right, or the reward model's mean score."""
PROXY = "raw/reward_model"
"""Figure of every episode that a reward model pays: its mean over the samples, before it is scaled."""
Rows = Sequence[Mapping[str, Any]]


def is_measured(episode: int, config: PPOConfig) -> bool:
    """Return whether the development split is answered after an episode, from 0: every so many, and after the last."""
    every = config.evaluate_every
    return every > 0 and ((episode + 1) % every == 0 or episode + 1 == config.episodes)


def best_episode(rows: Rows) -> int | None:
    """Return the place of the row with the highest development figure; None if none has one.

    Of equal ones it is the first, which is nearest to the start.

    >>> best_episode([{}, {"development": 0.5}, {"development": 0.75}, {"development": 0.75}])
    2
    """
    measured = [place for place, row in enumerate(rows) if DEVELOPMENT in row]
    return max(measured, key=lambda place: rows[place][DEVELOPMENT], default=None)


def why_it_stops(rows: Rows, config: PPOConfig) -> str | None:
    """Return why a run ends after these episodes, in a sentence; None if it goes on.

    Args:
        rows: figures of all episodes so far.
        config: the run's.
    """
    if not rows:
        return None
    return _by_kl(rows, config) or _by_drift(rows, config)


def _by_kl(rows: Rows, config: PPOConfig) -> str | None:
    limit, last = config.stop.kl, rows[-config.stop.episodes :]
    if limit is None or len(last) < config.stop.episodes or not all(row["kl"] > limit for row in last):
        return None
    shown = ", ".join(f"{row['kl']:.3f}" for row in last)
    return f"KL was {shown} nats in the last episodes, above ppo.stop.kl {limit:g}"


def _by_drift(rows: Rows, config: PPOConfig) -> str | None:
    limit, best = config.stop.drift, best_episode(rows)
    if limit is None or best is None:
        return None
    then = rows[best]
    last = [row for row in rows[best + 1 :] if DEVELOPMENT in row][-config.stop.episodes :]
    drifts = [then[DEVELOPMENT] - row[DEVELOPMENT] >= limit and row[PROXY] > then[PROXY] for row in last]
    if len(last) < config.stop.episodes or not all(drifts):
        return None
    return (
        f"since episode {ordinal(best)} the development figure fell from {then[DEVELOPMENT]:.3f} to "
        f"{last[-1][DEVELOPMENT]:.3f} while the reward model's score rose from {then[PROXY]:.3f} to "
        f"{last[-1][PROXY]:.3f} (ppo.stop.drift {limit:g})"
    )

"""A night's budget: what is spent, and whether PPO's next episode fits.

The run's lock in the store counts for how long its processes have worked, so a start after a crash counts on, and a
time in which nobody works is free.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.config.budget import HOUR_S
from rlhf_core.counting import counted
from tasks.context import Context, is_alone, open_context
from tasks.forecast import episode_s, evaluation_s, gpus_paid_for
from tasks.plan import recalled, recorded, settled_once
from tasks.progress import duration
from tasks.taken_over import HELD

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlhf_core.config import PipelineConfig
    from rlhf_core.config.budget import Limit
    from tasks.results import PPORun

_FIRST = "first episode of the night"


class Spent(NamedTuple):
    """What a run has spent by now."""

    hours: float
    gpu_hours: float
    cost: float


def worked_s() -> float:
    """Return for how many seconds processes have worked on the run that goes on here; 0 outside of a run."""
    held = HELD.get()
    return 0.0 if held is None else held.worked_s


def spent(context: Context, config: PipelineConfig) -> Spent:
    """Return what the run that goes on here has spent by now."""
    seconds, gpus = worked_s(), gpus_paid_for(context, config)
    hours = seconds / HOUR_S
    return Spent(hours, hours * gpus, config.budget.cost(seconds, gpus))


def why_it_ends_before(run: PPORun, episode: int, figures: Mapping[str, Any]) -> str | None:
    """Return why tonight's budget ends PPO before an episode; None if that begins.

    Where it has ended once, it has for every later start of the run.

    Args:
        run: of PPO.
        episode: that is due, from 0.
        figures: of the episode before; none before the first.
    """
    if not run.config.budget.is_set:
        return None
    context = open_context()
    question = f"why the budget ends PPO before episode {episode}"
    before: str | None = recalled(context, question, str)
    if before is not None:
        return before
    limit, now = run.config.budget.limit(gpus_paid_for(context, run.config)), worked_s()
    if math.isinf(limit.seconds):
        return None
    if now < limit.seconds and recalled(context, _FIRST, int) in {None, episode}:  # so that every night comes further
        recorded(context, _FIRST, int, episode)
        return None
    takes = sum(value for name, value in figures.items() if name.startswith("seconds_"))
    takes = takes or episode_s(context.store, run.preset) or 0.0
    room = _room(context, run)
    if now + takes + room < limit.seconds:
        return None
    return recorded(context, question, str, _told(run, episode, limit, now, takes, room))


def _told(run: PPORun, episode: int, limit: Limit, now: float, takes: float, room: float) -> str:
    further = f"the next would take {duration(takes)}" + (f", the evaluation {duration(room)}" if room else "")
    return (
        f"the night's budget of {limit.told} ends PPO after {episode} of "
        f"{counted(run.config.ppo.episodes, 'episode')}: {duration(now)} of {duration(limit.seconds)} are spent, "
        f"{further}; the next run with the same configuration and data goes on"
    )


def _room(context: Context, run: PPORun) -> float:
    """Return the seconds that are left for the evaluation that follows; none where PPO runs alone."""
    if is_alone():
        return 0.0
    return settled_once(
        context, "seconds of the evaluation", float, lambda: evaluation_s(context.store, run.preset), by_all=True
    )

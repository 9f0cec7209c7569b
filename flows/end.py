"""How every flow ends: what it made stands in its log's last line and in its state, which `rlhf run` shows."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from prefect.states import Completed

from rlhf_core.config import PipelineConfig
from tasks.arrivals import NothingNew, NothingNewError
from tasks.progress import say
from tasks.results import PLANNED, StageResult

P = ParamSpec("P")
R = TypeVar("R")


def ends_without_news(
    report: Callable[[PipelineConfig, NothingNew], str] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that ends a flow as completed, with a sentence, where data arrive and nothing is new.

    Its result is None then. A flow that is called with a dataset never ends so.

    Args:
        report: stores that it was so, and returns the reference; None for a flow that makes no night.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except NothingNewError as end:
                see = None if report is None else report(end.config, end.found)
                return finished(None, str(end), see=see)  # type: ignore[return-value]

        return guarded

    return decorate


def finished(result: R, told: str, *, see: str | None) -> R:
    """Return a flow's result as a state with a sentence; whoever called the flow gets the result.

    Args:
        result: what the flow returns.
        told: what it made, in words.
        see: reference of what a person looks at first; None where nothing was stored.
    """
    say("done", told)
    shown = f" (rlhf artifacts show {see})" if see else ""
    return Completed(message=f"{told}{shown}", data=result)  # type: ignore[return-value]


def made(*results: StageResult) -> str:
    """Return what stages made and what they found in the store, in words.

    >>> sft = StageResult(stage="sft", uri="sft/a@2", digest="", reused=False, seconds=1, metrics={})
    >>> made(sft)
    'made sft/a@2'
    >>> made(sft, sft.model_copy(update={"uri": "dataset/a@1", "reused": True}))
    'made sft/a@2; dataset/a@1 was in the store already'
    """
    new = list(dict.fromkeys(each.uri for each in results if not each.reused))
    found = list(dict.fromkeys(each.uri for each in results if each.reused and each.uri not in new))
    parts = [f"made {', '.join(new)}"] if new else []
    if found:
        parts.append(f"{', '.join(found)} {'were' if len(found) > 1 else 'was'} in the store already")
    return "; ".join(parts)


def unfinished(policy: StageResult) -> str:
    """Return what a later night adds to a policy, in words; nothing where it has all its episodes.

    >>> policy = StageResult(stage="ppo", uri="policy/a@1", digest="", reused=False, seconds=1, metrics={"episodes": 4})
    >>> unfinished(policy)
    ''
    >>> unfinished(policy.model_copy(update={"metrics": {"episodes": 4, "planned_episodes": 6}}))
    "; PPO has 4 of 6 episodes, at which the night's budget ended: the next run with the same data goes on"
    """
    planned = policy.metrics.get(PLANNED)
    if planned is None:
        return ""
    return (
        f"; PPO has {policy.metrics['episodes']} of {planned} episodes, at which the night's budget ended: the next "
        "run with the same data goes on"
    )

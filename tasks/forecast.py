"""What a run is likely to take, by stage: from what the stages of earlier runs of the same name took."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from rlhf_core.config.budget import HOUR_S
from rlhf_core.counting import counted
from tasks.clusters import address_of
from tasks.context import Context, open_context
from tasks.parents import wants_reward_model
from tasks.plan import settled_once
from tasks.progress import duration, say
from tasks.showing import only_shows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from infra.artifacts import ArtifactStore, Manifest
    from rlhf_core.config import PipelineConfig

NONE_EARLIER = "no earlier run to forecast from"
_LAST_RUNS = 3
"""Of which the longest evaluation counts: a run that finds most of it in the store is short."""


@only_shows("the forecast of time and cost")
def foretell(
    config: PipelineConfig, *, sft: bool = False, reward_model: bool = False, evaluation: bool = False
) -> None:
    """Say what a run that begins is likely to take, by stage, and whether its budget holds one episode.

    Args:
        config: of the run; where it has no budget, nothing is said.
        sft: whether SFT is a stage of it.
        reward_model: whether a reward model is, if the configuration wants one.
        evaluation: whether the evaluation is.
    """
    if not config.budget.is_set:
        return
    context = open_context()
    store, name = context.store, config.name
    episode = episode_s(store, name)
    seconds = {
        "sft": _latest_s(store, [("sft", name)]) if sft else 0.0,
        "reward-model": _latest_s(store, [("dataset", f"{name}-preferences"), ("reward-model", name)])
        if reward_model and wants_reward_model(config)
        else 0.0,
        "ppo": (episode or 0.0) * config.ppo.episodes,
        "evaluate": evaluation_s(store, name) if evaluation else 0.0,
    }
    if episode is None:
        say("budget", f"forecast: {NONE_EARLIER} ({name})")
        return
    gpus = gpus_paid_for(context, config)
    say("budget", told(config, seconds, gpus))
    limit = config.budget.limit(gpus)
    least = sum(seconds.values()) - seconds["ppo"] + episode
    if least > limit.seconds:
        say(
            "budget",
            f"warning: {limit.told} do not hold even one episode, which takes {duration(least)} with the other stages; "
            "raise the budget, or lower ppo.prompts_per_episode",
        )


def told(config: PipelineConfig, seconds: dict[str, float], gpus: int) -> str:
    """Return the forecast's line.

    Args:
        config: its budget has the prices.
        seconds: by stage; 0 is left out.
        gpus: that are paid for.
    """

    def figure(stage_s: float) -> str:
        cost = config.budget.cost(stage_s, gpus)
        return f"{stage_s / HOUR_S:.2f} h" + (f" (cost {cost:.2f})" if cost else "")

    stages = [f"{stage} {figure(each)}" for stage, each in seconds.items() if each]
    total = sum(seconds.values())
    gpu_hours = f", {total / HOUR_S * gpus:.2f} GPU hours" if gpus else ""
    episodes = counted(config.ppo.episodes, "episode")
    return (
        f"forecast: {', '.join(stages)}; in all {figure(total)}{gpu_hours} for {episodes}, less what the store holds "
        f"already; the limit is {config.budget.limit(gpus).told}"
    )


def gpus_paid_for(context: Context, config: PipelineConfig) -> int:
    """Return the GPUs of the run's machine, or of the cluster of the user's own; 0 where their number is not asked."""
    if not config.budget.counts_gpus:
        return 0
    from tasks.gpu_allocation import available_gpus

    def find() -> int:
        return available_gpus(address_of(config.ppo.cluster))

    return settled_once(context, "GPUs that the budget counts", int, find, by_all=True)


def episode_s(store: ArtifactStore, name: str) -> float | None:
    """Return how many seconds an episode of the latest policy of a name took on average; None if there is none."""
    policy = store.latest("policy", name)
    episodes = 0 if policy is None else int(str(policy.metrics.get("episodes", 0)))
    return _seconds([policy]) / episodes if policy is not None and episodes else None


def evaluation_s(store: ArtifactStore, name: str) -> float:
    """Return how many seconds all evaluations of one run took, at most, of the last runs of a name."""
    by_run: dict[str | None, list[Manifest]] = defaultdict(list)
    for evaluation in store.list("evaluation", name):
        by_run[evaluation.flow_run].append(evaluation)
    return max(map(_seconds, list(by_run.values())[-_LAST_RUNS:]), default=0.0)


def _latest_s(store: ArtifactStore, artifacts: Iterable[tuple[str, str]]) -> float:
    return _seconds([found for each in artifacts if (found := store.latest(*each)) is not None])


def _seconds(made: Iterable[Manifest]) -> float:
    return sum(float(str(each.metrics.get("seconds", 0.0))) for each in made)

"""What can be refused before anything is fetched or made: machine, model's path, references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ConfigError
from tasks.context import open_context
from tasks.parents import BASE_MODEL, resolve_policy, resolve_reward_model
from tasks.sentences import stage_task


@stage_task(name="preflight")
def preflight(
    config: PipelineConfig,
    *,
    trains: Literal["ppo", "sft", "reward-model"] | None,
    actor: str | None = None,
    reward_model: str | None = None,
) -> None:
    """Check a run's parameters against the machine and the store: memory first, references after.

    Args:
        config: the resolved preset.
        trains: the largest stage of the run; its models must fit. None trains nothing.
        actor: policy that was named.
        reward_model: reward model that was named.

    Raises:
        ConfigError: choices of PPO that exclude each other.
        ModelError: the machine cannot hold the models, or the model's path leads nowhere.
        StoreError: the store cannot be used, or a reference names nothing.
    """
    from infra.settings import settings
    from rlhf_core.models.memory import check_memory_for

    if trains == "ppo":
        check_ppo(config)
        check_reward_functions(config, settings().reward_modules)

    check_memory_for(config, settings().models_dir, trains=trains)
    context = open_context()
    if actor is not None and actor != BASE_MODEL:
        resolve_policy(context, config, actor)
    if reward_model is not None:
        resolve_reward_model(context, config, reward_model)


def check_ppo(config: PipelineConfig) -> None:
    """Check relations between choices of PPO.

    Raises:
        ConfigError: two choices exclude each other.
    """
    ppo = config.ppo
    if ppo.critic_init == "reward_model" and ppo.advantage_estimator != "gae":
        raise ConfigError(
            f"ppo.critic_init is reward_model, but ppo.advantage_estimator {ppo.advantage_estimator} has no critic; "
            "set the first to policy, or the second to gae"
        )
    if ppo.critic_init == "reward_model" and ppo.legacy:
        raise ConfigError(
            "ppo.legacy judges by rules of its own, to whose returns no critic is fitted; set ppo.critic_init to policy"
        )


def check_reward_functions(config: PipelineConfig, allowed_modules: Sequence[str]) -> None:
    """Check that every reward function has a name that leads somewhere, without importing it.

    Raises:
        ConfigError: one does not, lies in a module that is not allowed, or scores another task than the data's.
    """
    from rlhf_core.rewards.resolve import resolve_reward_function

    for name in config.ppo.reward.functions:
        task = resolve_reward_function(name, allowed_modules=allowed_modules).arguments.get("task")
        if task not in {None, config.data.task}:
            raise ConfigError(
                f"reward function {name!r} scores by the records of task {task!r}, but data.task is "
                f"{config.data.task!r}; draw the data from that task, or choose another function"
            )

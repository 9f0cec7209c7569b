"""What can be refused before anything is fetched or made: machine, model's path, references."""

from __future__ import annotations

from rlhf_core.config import PipelineConfig
from tasks.context import BASE_MODEL, open_context, resolve_policy, resolve_reward_model
from tasks.sentences import stage_task


@stage_task(name="preflight")
def preflight(
    config: PipelineConfig,
    *,
    trains_ppo: bool,
    actor: str | None = None,
    reward_model: str | None = None,
    data: str | None = None,
) -> None:
    """Check a run's parameters against the machine and the store: memory first, references after.

    Args:
        config: the resolved preset.
        trains_ppo: whether PPO is part of the run, so that its models must fit.
        actor: policy that was named.
        reward_model: reward model that was named.
        data: dataset that was named; a file is checked when it is read.

    Raises:
        ModelError: the machine cannot hold the models, or the model's path leads nowhere.
        StoreError: the store cannot be used, or a reference names nothing.
    """
    from infra.settings import settings
    from rlhf_core.models.loading import find_local
    from rlhf_core.models.memory import check_memory_for

    if trains_ppo:
        check_memory_for(config, settings().models_dir)
    else:
        find_local(config.model.path, models_dir=settings().models_dir)
    context = open_context()
    if actor is not None and actor != BASE_MODEL:
        resolve_policy(context, config, actor)
    if reward_model is not None:
        resolve_reward_model(context, config, reward_model)
    if data is not None and data.startswith("dataset/"):
        context.store.resolve(data)

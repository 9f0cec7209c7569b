"""What can be refused before anything is fetched or made: machine, model's path, references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from rlhf_core.config import PipelineConfig
from rlhf_core.errors import ConfigError, Fault, refuse_together
from tasks.clusters import address_of
from tasks.context import Context, open_context
from tasks.evaluate import judged_by_reward_model, nobody_judges
from tasks.gpu_allocation import available_gpus, gpu_shares, trainer_share
from tasks.parents import (
    BASE_MODEL,
    ppo_wants_reward_model,
    resolve_policy,
    resolve_reward_model,
    settle_policy,
    settle_reward_model,
)
from tasks.plan import settled_once
from tasks.progress import say
from tasks.task_errors import stage_task

Trained = Literal["sft", "reward_model", "ppo"]
"""A stage that trains, by the name of its configuration."""
_HALF = 0.5


class Models(NamedTuple):
    """What a flow starts from, by version."""

    actor: str | None
    """None: it trains its own."""
    reward_model: str | None
    """None: it trains its own, or asks none."""


_PRECISIONS: dict[str, Literal["fp32", "bf16", "fp16"]] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def settle_arithmetic(context: Context, config: PipelineConfig, gpus: Mapping[Trained, int]) -> PipelineConfig:
    """Return a configuration that computes in float32 where nobody set bfloat16 and the processor is slower with it.

    It is this machine's processor that is asked, though a stage may train on a cluster elsewhere; all flows of a run,
    and its restarts, go by the first answer.

    Args:
        context: the open context.
        config: the preset with the run's parameters, which knows what of it was set.
        gpus: how many there are for each stage that trains in the run.
    """
    keys = _on_processors(config, gpus)
    slow = [(section, key) for section, key in keys if getattr(getattr(config, section), key) == "bfloat16"]
    free = [(section, key) for section, key in slow if key not in getattr(config, section).model_fields_set]

    def is_slow() -> bool:
        from rlhf_core.models.loading import has_fast_bfloat16

        if has_fast_bfloat16():
            return False
        if free:
            say("machine", f"this processor is faster with float32 than with bfloat16: float32 for {_told(free)}")
        if kept := [each for each in slow if each not in free]:
            say("machine", f"this processor is faster with float32 than with bfloat16, which is set: {_told(kept)}")
        return True

    if not slow or not settled_once(context, "whether bfloat16 is slow", bool, is_slow, by_all=True):
        return config
    for section, key in free:
        changed = getattr(config, section).model_copy(update={key: "float32"})
        config = config.model_copy(update={section: changed})
    return config


def _on_processors(config: PipelineConfig, gpus: Mapping[Trained, int]) -> list[tuple[str, str]]:
    """Return the keys of the arithmetic that processors, and no GPU, are to do."""
    cluster = config.ppo.cluster
    shares: dict[tuple[str, str], float] = {
        (stage, "dtype"): trainer_share(cluster, count, getattr(config, stage).num_trainers)
        if leaves_process(config, stage)
        else count
        for stage, count in gpus.items()
    }
    if "ppo" in gpus:
        _, shares["ppo", "rollout_dtype"] = gpu_shares(cluster, gpus["ppo"], config.ppo.num_trainers)
    elif "reward_model" in gpus and not config.data.preferences:  # the flow's own process samples pairs
        shares["ppo", "rollout_dtype"] = available_gpus()
    if "ppo" in gpus or not gpus:  # the flow's own process evaluates
        shares["evaluation", "dtype"] = available_gpus()
    return [key for key, share in shares.items() if not share]


def _told(keys: Sequence[tuple[str, str]]) -> str:
    return ", ".join(map(".".join, keys))


@stage_task(name="preflight")
def preflight(
    config: PipelineConfig,
    *,
    trains: Literal["ppo", "sft", "reward-model"] | None,
    stages: Sequence[Trained] = (),
    actor: str | None = None,
    reward_model: str | None = None,
) -> PipelineConfig:
    """Check a run's parameters against the machine and the store, and settle the arithmetic.

    Args:
        config: the resolved preset.
        trains: the last stage of the run that trains. None trains nothing.
        stages: all stages that train in the run; their models must fit, and their strategies be possible here.
        actor: policy that was named.
        reward_model: reward model that was named.

    Returns:
        The configuration, with the arithmetic that suits the machine.

    Raises:
        ClusterError: nobody answers at the address of the user's own cluster.
        ConfigError: choices that exclude each other, a strategy that cannot be had here, a reward function or verifier
            that leads nowhere.
        ModelError: the machine cannot hold the models, or the model's path leads nowhere.
        StoreError: the store cannot be used, or a reference names nothing.
    """
    from infra.settings import settings
    from rlhf_core.forgetting.suites import check_suites
    from rlhf_core.models.locating import find_local
    from rlhf_core.models.memory import check_memory_for

    if trains == "ppo":
        check_ppo(config)
        check_reward_functions(config, settings().reward_modules)
    check_verifier(config, settings().reward_modules)
    check_suites(config.evaluation.forgetting, settings().reward_modules)
    if find_local(config.model.path, models_dir=settings().models_dir) is None:
        check_judges(config, trains=trains)  # with the model at hand, the data say it together with all else
    address = address_of(config.ppo.cluster)
    gpus = {stage: available_gpus(address if leaves_process(config, stage) else None) for stage in stages}
    context = open_context()
    config = settle_arithmetic(context, config, gpus)
    if "ppo" in stages and config.ppo.engine == "vllm" and address is None:
        from rlhf_core.generation.vllm_engine import check_vllm

        check_vllm(on_gpu=gpu_shares(config.ppo.cluster, gpus["ppo"], config.ppo.num_trainers)[1] > 0)
    for stage in stages:
        check_trainers(config, [stage], gpus=gpus[stage])
    check_parts(config, stages)
    here = [stage for stage in stages if address is None or not leaves_process(config, stage)]
    for stage in here:
        _check_passes(config, stage, gpus=gpus[stage])
    check_memory_for(config, settings().models_dir, stages=here)
    if actor is not None and actor != BASE_MODEL:
        resolve_policy(context, config, actor)
    if reward_model is not None:
        resolve_reward_model(context, config, reward_model)
    return config


def settle_models(
    config: PipelineConfig,
    *,
    trains: Literal["ppo", "sft", "reward-model"] | None,
    stages: Sequence[Trained],
    actor: str | None,
    reward_model: str | None,
) -> Models:
    """Return what a flow starts from, each by its version: the latest where nobody named one and the flow trains none.

    A run that is started again takes what it took at first. Arguments of `preflight`.

    Raises:
        ConfigError: none was trained yet.
        StoreError: the store cannot be used, or a reference names nothing.
    """
    context = open_context()
    starts_from_one = trains == "reward-model" or (trains == "ppo" and "sft" not in stages)
    if actor is not None or trains is None or starts_from_one:
        actor = settle_policy(context, config, actor, trained=trains is None)
    asks_one = (trains == "ppo" and "reward_model" not in stages and ppo_wants_reward_model(config)) or (
        trains is None and judged_by_reward_model(config)
    )
    if reward_model is not None or asks_one:
        reward_model = settle_reward_model(context, config, reward_model)
    return Models(actor, reward_model)


def leaves_process(config: PipelineConfig, stage: Trained) -> bool:
    """Whether a stage trains in processes of its own, on a Ray cluster."""
    return stage == "ppo" or not getattr(config, stage).is_alone


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


def _on_gpu(config: PipelineConfig, gpus: int) -> bool:
    return gpus > 0 and config.ppo.cluster.trainer_gpus != 0


def _check_passes(config: PipelineConfig, stage: Trained, *, gpus: int) -> None:
    import torch

    from rlhf_core.training.modes import check_passes

    cuda = _on_gpu(config, gpus)
    # a GPU is tried by who learns: this process takes no piece of one
    check_passes(getattr(config, stage), torch.device("cuda" if cuda else "cpu"), try_compiling=not cuda)


def check_trainers(config: PipelineConfig, stages: Sequence[Trained], *, gpus: int) -> None:
    """Check that each stage's trainers can train as its strategy says, before anything is loaded.

    Args:
        config: the resolved preset.
        stages: that train.
        gpus: of this machine.

    Raises:
        ConfigError: if they cannot; it names the stage.
    """
    from rlhf_core.strategy.factory import check_strategy

    cuda = _on_gpu(config, gpus)
    for stage in stages:
        settings = getattr(config, stage)
        batch_size = settings.train_batch_size if stage == "ppo" else settings.batch_size
        try:
            check_strategy(
                settings.strategy,
                precision=_PRECISIONS[settings.dtype],
                cuda=cuda,
                num_trainers=settings.num_trainers,
                adapters=getattr(settings, "lora", None) is not None,
                accumulates=batch_size > settings.micro_batch_size or getattr(settings, "ptx_coef", 0) > 0,
                parts=settings.parts,
            )
        except ConfigError as error:
            raise ConfigError(f"{stage}.strategy cannot be had: {error}") from error
        if cuda and settings.strategy != "plain" and settings.num_trainers > gpus:
            raise ConfigError(
                f"{stage}.strategy {settings.strategy} needs a GPU for each of {settings.num_trainers} trainers, but "
                f"this machine has {gpus}; lower {stage}.num_trainers, or set the strategy to plain"
            )
        share = config.ppo.cluster.trainer_gpus
        if cuda and settings.strategy != "plain" and settings.num_trainers > 1 and share is not None and share <= _HALF:
            raise ConfigError(
                f"{stage}.strategy {settings.strategy} needs a GPU for each of {settings.num_trainers} trainers, but "
                f"ppo.cluster.trainer_gpus is {share:g}, of which several fit on one; raise it above {_HALF}, or leave "
                "it out"
            )


def check_parts(config: PipelineConfig, stages: Sequence[Trained]) -> None:
    """Check that the model can be cut as a stage's strategy 3d says; not one that is still in a hub.

    Raises:
        ConfigError: if it cannot; it names the stage.
    """
    from infra.settings import settings
    from rlhf_core.models.locating import find_local
    from rlhf_core.strategy.tensor_parallel import check_parts_of

    cut = {stage: trainers.parts for stage in stages if (trainers := getattr(config, stage)).strategy == "3d"}
    directory = find_local(config.model.path, models_dir=settings().models_dir) if cut else None
    for stage, parts in cut.items():
        if directory is None:
            continue
        try:
            check_parts_of(directory, parts)
        except ConfigError as error:
            raise ConfigError(f"{stage}.strategy cannot be had: {error}") from error


def check_verifier(config: PipelineConfig, allowed_modules: Sequence[str]) -> None:
    """Check that the data's verifier names something that exists, without importing it.

    Raises:
        ConfigError: there is none, its module is not allowed, or it scores another task than the data's.
    """
    from rlhf_core.rewards.verifying import EXACT, resolve_verifier

    if config.data.verifier not in {None, EXACT}:
        resolve_verifier(str(config.data.verifier), task=config.data.task, allowed_modules=allowed_modules)


def check_judges(config: PipelineConfig, *, trains: Literal["ppo", "sft", "reward-model"] | None) -> None:
    """Check that no verifier is asked about prompts that have no answers, as far as the configuration tells.

    Args:
        config: the resolved preset.
        trains: the largest stage of the run; None evaluates.

    Raises:
        ConfigError: one is.
    """
    from rlhf_core.rewards.verifying import asks_for_answers

    data = config.data
    if asks_for_answers(data):
        return
    given = "data.prompts" if data.prompts else "data.preferences" if data.preferences else "data.demonstrations"
    faults = []
    if trains == "ppo" and config.ppo.reward.verifier > 0:
        sentence = (
            f"ppo.reward.verifier is {config.ppo.reward.verifier:g}, but the prompts of {given} have no answers to "
            "verify; set ppo.reward.verifier to 0 and ppo.reward.reward_model above 0, or give problems with answers "
            "(data.problems, or data.demonstrations with data.verifier)"
        )
        faults.append(Fault(sentence, {"ppo.reward.verifier": 0, "ppo.reward.reward_model": 1}))
    if trains in {"ppo", None} and not data.evaluation and not judged_by_reward_model(config):
        faults.append(Fault(nobody_judges(config), {"evaluation.judge": "reward_model"}))
    refuse_together(faults)


def check_reward_functions(config: PipelineConfig, allowed_modules: Sequence[str]) -> None:
    """Check that every reward function names something that exists, without importing it.

    Raises:
        ConfigError: there is none, its module is not allowed, or it scores another task than the data's.
    """
    from rlhf_core.rewards.resolve import resolve_reward_function

    for name in config.ppo.reward.functions:
        task = resolve_reward_function(name, allowed_modules=allowed_modules).arguments.get("task")
        if task not in {None, config.data.task}:
            raise ConfigError(
                f"reward function {name!r} scores by the records of task {task!r}, but data.task is "
                f"{config.data.task!r}; draw the data from that task, or choose another function"
            )

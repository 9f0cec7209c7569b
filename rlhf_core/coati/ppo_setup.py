"""From the parameters of coati's `PPOTrainer` to configurations, and the checks before anything is spent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from rlhf_core.config import LearningConfig, PPOOptions, RolloutConfig
from rlhf_core.config.base import Config
from rlhf_core.errors import ConfigError
from rlhf_core.generation import GenerationSettings
from rlhf_core.models.compatibility import check_same_tokenizer
from rlhf_core.models.trunk import unwrapped
from rlhf_core.rewards.scoring import REWARD_MODEL, Weighted, WeightedScorer
from rlhf_core.rewards.sources import AnyRewardModel, model_source
from rlhf_core.rollout.advantages import WITH_CRITIC
from rlhf_core.strategy.booster import Booster

AnyConfig = TypeVar("AnyConfig", bound=Config)

WHOLE_BATCH = 1 << 20  # rows of a chunk: more than any batch has, so that each is sampled whole, as coati does
_DTYPES = {"torch.float32": "float32", "torch.bfloat16": "bfloat16", "torch.float16": "float16"}


def checked(kind: type[AnyConfig], **values: Any) -> AnyConfig:
    """Return the configuration.

    Raises:
        ConfigError: in one sentence, if a value is out of its range.
    """
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        said = f"{name} is {first['input']!r}; {first['msg']}" if name else first["msg"]
        raise ConfigError(said.replace("Value error, ", "")) from error


def with_precision(options: PPOOptions, booster: Booster) -> PPOOptions:
    """Return the options with the booster's arithmetic where they name none and the booster says which it is."""
    dtype = _DTYPES.get(str(getattr(booster, "autocast_dtype", None)))
    if dtype is None:
        return options
    rollout = "float32" if dtype == "float32" else "bfloat16"
    chosen = {"dtype": dtype, "rollout_dtype": rollout}
    return options.model_copy(update={k: v for k, v in chosen.items() if k not in options.model_fields_set})


def rollout_config(options: PPOOptions, generation: GenerationSettings, *, kl_coef: float) -> RolloutConfig:
    """Return the configuration of the maker; what scores is handed to it apart."""
    return checked(
        RolloutConfig,
        **options.model_dump(),
        **_sampling(generation),
        max_new_tokens=generation.max_new_tokens,
        max_length=generation.max_length,
        kl_coef=kl_coef,
        chunk_size=WHOLE_BATCH * options.samples_per_prompt,
        max_prompt_tokens=WHOLE_BATCH,  # the total length is what is limited
    )


def learning_config(
    options: PPOOptions,
    generation: GenerationSettings,
    *,
    train_batch_size: int,
    accumulation_steps: int,
    **losses: float,
) -> LearningConfig:
    """Return the configuration of the learner: a minibatch is a window of training batches, and has as many passes."""
    for name, value in (("train_batch_size", train_batch_size), ("accumulation_steps", accumulation_steps)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    return checked(
        LearningConfig,
        **options.model_dump(),
        **_sampling(generation),
        train_batch_size=train_batch_size * accumulation_steps,
        micro_batch_size=train_batch_size,
        **losses,
    )


def check_run(seed: int, buffer_limit: int, critic: tuple[Any, ...], options: PPOOptions) -> None:
    """See that numbers are in range, that choices go together, and that a critic comes with what trains it.

    Args:
        seed: of the run.
        buffer_limit: batches that are kept.
        critic: the critic, its optimizer, schedule and booster.
        options: whose estimator says whether the critic is trained.

    Raises:
        ConfigError: otherwise.
    """
    for name, value in (("seed", seed), ("buffer_limit", buffer_limit)):
        if value < 0:
            raise ConfigError(f"{name} must be at least 0, got {value}")
    if options.flash_attention and options.rollout_dtype == "float32":  # the actor itself answers prompts
        raise ConfigError("flash_attention knows 16 bits alone, but rollout_dtype is float32; set that to bfloat16")
    names = ("critic_optim", "critic_lr_scheduler", "critic_booster")
    missing = [name for name, value in zip(names, critic[1:], strict=True) if value is None]
    if critic[0] is not None and missing and options.advantage_estimator == WITH_CRITIC:
        raise ConfigError(f"there is a critic to train, but no {' and no '.join(missing)}; give what trains it")


def scorer_of(reward_model: AnyRewardModel | None, *, scaled: bool) -> WeightedScorer:
    """Return what judges responses by the reward model alone.

    Raises:
        ConfigError: if there is none.
    """
    if reward_model is None:
        raise ConfigError("expected a reward_model (a RewardModel or an RLVRRewardModel), or a scorer; got neither")
    return WeightedScorer([Weighted(REWARD_MODEL, 1.0, model_source(reward_model))], scaled=scaled)


def check_models(actor: Any, others: Mapping[str, Any], tokenizer: Any) -> None:
    """See that all models read the same tokens.

    Args:
        actor: must know every token of the tokenizer.
        others: by name; what is None or no model of transformers is left out, as it has no vocabulary.
        tokenizer: the actor's.

    Raises:
        ModelError: naming the two that differ.
    """
    check_same_tokenizer(actor, tokenizer, what="the actor and the tokenizer")
    for name, model in others.items():
        inner = unwrapped(model)
        if hasattr(getattr(inner, "trunk", inner), "get_input_embeddings"):
            check_same_tokenizer(actor, model, what=f"the actor and the {name}")


def _sampling(generation: GenerationSettings) -> dict[str, Any]:
    return {"temperature": generation.temperature, "top_k": generation.top_k, "top_p": generation.top_p}

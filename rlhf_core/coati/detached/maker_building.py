"""From the parameters of coati's `ExperienceMakerHolder` to an experience maker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_core.coati.detached.factories import get_model_numel
from rlhf_core.coati.generate_kwargs import generation_settings_from_kwargs, is_greedy
from rlhf_core.coati.ppo_setup import check_models, rollout_config, scorer_of, with_precision
from rlhf_core.coati.script.models import MODELS_DIR
from rlhf_core.config import PPOOptions, TemplateConfig
from rlhf_core.data import PromptTemplate
from rlhf_core.errors import ConfigError
from rlhf_core.models.loading import load_tokenizer, locate_model
from rlhf_core.models.lora import adapter_config, merge_adapters
from rlhf_core.rewards.scoring import Scorer
from rlhf_core.rollout.experience import ExperienceMaker
from rlhf_core.strategy.strategy import Strategy

Models = tuple[Any, Any, Any, Any]
"""Actor, critic, reward model, initial model; critic and initial model may be None."""


@dataclass(frozen=True, slots=True)
class MakerSettings:
    """What a maker is built by, besides its models."""

    options: PPOOptions
    tokenizer: PreTrainedTokenizerBase | None
    """None takes the one beside the actor's weights."""
    scorer: Scorer | None
    """None takes the reward model."""
    seed: int
    kl_coef: float
    generate_kwargs: Mapping[str, Any]
    keeps_adapters: bool
    """Trainers send adapters and the weights below them apart; else merged."""


class Built(NamedTuple):
    """A maker, and the numbers of its models' parameters."""

    maker: ExperienceMaker
    sizes: tuple[int, int, int, int]
    """Of actor, critic, initial model and reward model."""


def build_maker(
    name: str, strategy_fn: Callable[[], Strategy], model_fn: Callable[[], Models], settings: MakerSettings
) -> Built:
    """Return an experience maker over new models.

    Args:
        name: of the actor, for messages.
        strategy_fn: builds what says where models go.
        model_fn: builds the models.
        settings: everything else.

    Raises:
        ConfigError: if something is missing, or a value is out of range.
        ModelError: if the models do not read the same tokens.
    """
    strategy = strategy_fn()
    with strategy.model_init_context():
        actor, critic, reward_model, initial_model = model_fn()
    if not settings.keeps_adapters:
        _fold_adapters(name, actor, critic, initial_model)
    for model in (actor, critic, reward_model, initial_model):
        if isinstance(model, nn.Module):
            model.to(strategy.device)
    tokenizer, options = _tokenizer_of(name, actor, settings), with_precision(settings.options, strategy.new_booster())
    others = {"critic": critic, "reward model": reward_model, "initial model": initial_model}
    check_models(actor, others, tokenizer)
    generation = generation_settings_from_kwargs(settings.generate_kwargs, tokenizer)
    maker = ExperienceMaker(
        actor,
        critic,
        settings.scorer or scorer_of(reward_model, scaled=not options.legacy),
        initial_model,
        config=rollout_config(options, generation, kl_coef=settings.kl_coef),
        template=PromptTemplate(tokenizer, TemplateConfig()),
        seed=settings.seed,
        legacy_form="detached",
        generation=generation,
        greedy=is_greedy(settings.generate_kwargs),
    )
    sizes = (_size(actor), _size(critic), _size(initial_model) or _size(actor), _size(reward_model))
    return Built(maker, sizes)


def _fold_adapters(name: str, actor: Any, critic: Any, initial_model: Any) -> None:
    """Merge adapters where trainers send merged weights."""
    if initial_model is None and adapter_config(actor) is not None:
        raise ConfigError(
            f"{name} has no initial model, so that the actor without its adapters is the reference; give one, or set "
            "update_lora_weights here and in the trainers"
        )
    for model in (actor, critic):
        if isinstance(model, nn.Module) and adapter_config(model) is not None:
            merge_adapters(model)


def _tokenizer_of(name: str, actor: Any, settings: MakerSettings) -> PreTrainedTokenizerBase:
    if settings.tokenizer is not None:
        return settings.tokenizer
    path = getattr(actor, "name_or_path", "")
    if not path:
        raise ConfigError(f"{name} cannot read its models' tokens; give tokenizer=")
    return load_tokenizer(locate_model(path, models_dir=MODELS_DIR.expanduser()))


def _size(model: Any) -> int:
    return get_model_numel(model) if isinstance(model, nn.Module) else 0

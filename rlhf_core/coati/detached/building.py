"""From the parameters of coati's detached classes to a learner, and to an experience maker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase

from rlhf_core.coati.detached.factories import get_model_numel
from rlhf_core.coati.generate_kwargs import generation_settings_from_kwargs, is_greedy
from rlhf_core.coati.ppo_setup import check_models, learning_config, rollout_config, scorer_of, with_precision
from rlhf_core.coati.script.models import MODELS_DIR
from rlhf_core.coati.strategy import Strategy
from rlhf_core.config import LearningConfig, PPOOptions, TemplateConfig
from rlhf_core.data import PromptTemplate
from rlhf_core.errors import ConfigError
from rlhf_core.generation import GenerationSettings
from rlhf_core.models.loading import load_tokenizer, locate_model
from rlhf_core.models.lora import adapter_config, merge_adapters
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.rewards.scoring import Scorer
from rlhf_core.rollout.experience import ExperienceMaker
from rlhf_core.training.optim import BETAS, Trained, fit_to_train, follow

LEGACY_LR = 1e-7
"""coati's, which no parameter of its detached trainer changes."""


@dataclass(frozen=True, slots=True)
class LearningOptions:
    """How a detached PPO trainer learns: what coati has no parameters for."""

    lr: float = LEGACY_LR
    """Of the actor. The default is coati's, with which hardly anything moves: set it."""
    critic_lr: float | None = None
    """Of the critic; None takes the actor's."""
    weight_decay: float = 0.0
    lr_schedule: Callable[[int], float] | None = None
    """Factor on both rates by optimizer step, from 0; None keeps them constant."""
    vf_coef: float = 1.0
    """Weight of the critic's loss."""
    ptx_coef: float = 0.0
    """Weight of the demonstrations' loss, in [0, 1); the policy's gets what is left of 1."""
    apply_loss_mask: bool = True
    """Learn those tokens of demonstrations that have labels; otherwise all of them."""
    accumulation_steps: int = 1
    """Batches of an optimizer step."""
    temperature: float = 1.0
    """That makers draw with."""
    max_new_tokens: int = 256
    """Longest response that makers draw; the aggregation `constant_length` divides by it."""

    @property
    def generation(self) -> GenerationSettings:
        """How makers draw, as far as learning depends on it."""
        return GenerationSettings(
            max_new_tokens=self.max_new_tokens,
            stop_ids=(),
            pad_id=0,
            temperature=self.temperature,
        )

    def expected_of(self, options: PPOOptions, seed: int) -> dict[str, Any]:
        """Return what makers must say of themselves, as fields of `MakerFacts`."""
        return {"seed": seed, "options": options.model_dump(), "temperature": self.temperature} | (
            {"max_new_tokens": self.max_new_tokens} if options.aggregation == "constant_length" else {}
        )


def build_learner(
    strategy: Strategy,
    model_fn: Callable[[], tuple[Any, Any]],
    learning: LearningOptions,
    options: PPOOptions,
    *,
    seed: int,
    **sizes_and_clips: Any,
) -> PPOLearner:
    """Return a learner over new models; called by all ranks.

    Args:
        strategy: of training.
        model_fn: builds actor and critic; the critic may be None, with an estimator that needs none.
        learning: rates and weights of the losses.
        options: choices of the algorithm.
        seed: of the dropout.
        **sizes_and_clips: train_batch_size, eps_clip and value_clip.

    Raises:
        ConfigError: if a value is out of range.
        ModelError: if nothing of a model is trained, or something trained is not float32.
    """
    with strategy.model_init_context():
        actor_model, critic_model = model_fn()
    actor = _trained(strategy, actor_model, learning.lr, learning)
    critic_lr = learning.lr if learning.critic_lr is None else learning.critic_lr
    critic = None if critic_model is None else _trained(strategy, critic_model, critic_lr, learning)
    config: LearningConfig = learning_config(
        with_precision(options, actor.booster),
        learning.generation,
        accumulation_steps=learning.accumulation_steps,
        vf_coef=learning.vf_coef,
        ptx_coef=learning.ptx_coef,
        **sizes_and_clips,
    )
    return PPOLearner(
        actor,
        critic,
        config,
        device=strategy.device,
        ranks=strategy.ranks,
        seed=seed,
        max_new_tokens=learning.max_new_tokens,
    )


def _trained(strategy: Strategy, model: nn.Module, lr: float, learning: LearningOptions) -> Trained:
    if lr <= 0:
        raise ConfigError(f"a learning rate must be above 0, got {lr}")
    parameters = fit_to_train(model)
    groups: dict[float, list[nn.Parameter]] = {}
    for parameter in parameters.values():  # as `make_trained` groups them: the order decides last bits
        groups.setdefault(learning.weight_decay if parameter.ndim > 1 else 0.0, []).append(parameter)
    members = [{"params": members, "weight_decay": decay} for decay, members in groups.items()]
    optimizer = strategy.new_optimizer(members, lr=lr, betas=BETAS)
    schedule = learning.lr_schedule or (lambda _: 1.0)
    boosted = strategy.prepare({"model": model, "optimizer": optimizer, "lr_scheduler": LambdaLR(optimizer, schedule)})
    follow(boosted["lr_scheduler"], boosted["optimizer"])
    return Trained(
        boosted["model"], boosted["optimizer"], boosted["lr_scheduler"], strategy.booster_of(boosted["model"])
    )


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

"""From a strategy and the models that coati's `model_fn` returns to a learner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from rlhf_core.coati.ppo_setup import learning_config, with_precision
from rlhf_core.config import LearningConfig, PPOOptions
from rlhf_core.errors import ConfigError
from rlhf_core.generation import GenerationSettings
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.strategy.strategy import Strategy
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

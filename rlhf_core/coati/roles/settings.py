"""What every role of a run is told: small and plain, so that it crosses to the actors. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.config import PPOOptions
from rlhf_core.config.strategy import StrategyName

if TYPE_CHECKING:
    from argparse import Namespace

    from rlhf_core.config import LearningConfig, RolloutConfig
    from rlhf_core.generation import GenerationSettings
    from rlhf_core.strategy.booster import Precision

_DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32", "rollout_dtype": "float32"},
    "bf16": {"dtype": "bfloat16", "rollout_dtype": "bfloat16"},
    "fp16": {"dtype": "float16", "rollout_dtype": "bfloat16"},
}


@dataclass(frozen=True)
class RoleSettings:
    """How the four models are loaded, draw, judge and learn."""

    pretrain: str
    """Of the actor, the initial model, and the trunk of the critic."""
    model: str
    """Kind of architecture that `pretrain` must hold; auto takes any."""
    rm_pretrain: str | None
    """Directory of a trained reward model; None takes an untrained one."""
    strategy: StrategyName
    """Of actor and critic."""
    precision: Precision
    seed: int
    lr: float
    critic_lr: float
    grad_clip: float
    kl_coef: float
    lam: float
    eps_clip: float
    value_clip: float
    train_batch_size: int
    """Rows of one actor rank in an optimizer step: times the actor's ranks, what actor and critic both learn from."""
    max_epochs: int
    experience_batch_size: int
    """Prompts of one actor rank in a time step."""
    max_length: int
    """Tokens of prompt and response together."""
    max_prompt_tokens: int
    temperature: float
    top_k: int
    actor_ranks: int
    critic_ranks: int
    save_path: str
    """Where the actor's first process writes the policy at the end."""
    timeout_s: float
    """Longest wait of one process for another."""

    @classmethod
    def from_args(cls, args: Namespace) -> RoleSettings:
        """Return what the flags say."""
        given = vars(args) | {
            "precision": args.mixed_precision,
            "critic_lr": args.lr if args.critic_lr is None else args.critic_lr,
            "actor_ranks": args.num_actor_nodes * args.num_gpus_per_node,
            "critic_ranks": args.num_critic_nodes * args.num_gpus_per_node,
        }
        return cls(**{name: given[name] for name in cls.__dataclass_fields__})

    @property
    def options(self) -> PPOOptions:
        """The algorithm's choices, as `PPOTrainer` takes them."""
        return PPOOptions(lam=self.lam, **_DTYPES[self.precision])

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """How responses are drawn, as `PPOTrainer` takes it."""
        return {
            "max_length": self.max_length,
            "max_new_tokens": self.max_length,
            "temperature": self.temperature,
            "top_k": self.top_k,
        }

    def rollout(self, generation: GenerationSettings) -> RolloutConfig:
        """Return the configuration of making experience."""
        from rlhf_core.coati.ppo_setup import rollout_config  # noqa: PLC0415 - torch

        return rollout_config(self.options, generation, kl_coef=self.kl_coef)

    def learning(self, generation: GenerationSettings, ranks: int) -> LearningConfig:
        """Return the configuration of learning, for a group of so many ranks.

        Every group steps from the same rows, whatever its number of ranks: the actor's share of each rank, times the
        actor's ranks. They are divisible, which the flags were checked for.
        """
        from rlhf_core.coati.ppo_setup import learning_config  # noqa: PLC0415 - torch

        own = self.train_batch_size * self.actor_ranks // ranks
        at_once = math.gcd(own, self.train_batch_size)
        return learning_config(
            self.options,
            generation,
            train_batch_size=at_once,
            accumulation_steps=own // at_once,
            max_epochs=self.max_epochs,
            eps_clip=self.eps_clip,
            value_clip=self.value_clip,
            grad_clip=self.grad_clip,
        )

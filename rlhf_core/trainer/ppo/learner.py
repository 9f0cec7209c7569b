"""The PPO learner: one optimizer step for actor and critic from one minibatch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_core.buffer.order import minibatch_order
from rlhf_core.config import LearningConfig, PPOConfig, RolloutConfig
from rlhf_core.errors import ConfigError, ModelError, TrainingError
from rlhf_core.models.actor import response_logprobs
from rlhf_core.models.critic import Critic
from rlhf_core.models.device import autocast
from rlhf_core.models.lora import merged_parameters
from rlhf_core.models.trunk import unwrapped
from rlhf_core.strategy.plain import PlainBooster, Precision
from rlhf_core.strategy.ranks import Ranks, current_ranks
from rlhf_core.trainer.base import PaddedBatch
from rlhf_core.trainer.learning_mode import checkpoint_activations
from rlhf_core.trainer.optim import Trained, make_trained
from rlhf_core.trainer.ppo.critic_start import ValueLine, fit_line, rescale_experience, rescale_head
from rlhf_core.trainer.ppo.minibatch import prepare
from rlhf_core.trainer.ppo.ptx import PtxSource
from rlhf_core.trainer.ppo.stats import PPOStats, stats_from
from rlhf_core.trainer.ppo.steps import StepContext, step_all
from rlhf_core.trainer.schedules import warmup_then_constant
from rlhf_core.trainer.state import LearnerState, load_state_tensors, state_tensors
from rlhf_core.types import Experience

__all__ = ["PPOLearner", "PPOStats"]

logger = logging.getLogger(__name__)

_PRECISIONS: dict[str, Precision] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_FACTS = "learner"


class PPOLearner:
    """Owns actor, critic, their optimizers and schedules; knows neither Ray nor where experience comes from.

    Dropout would make the ratio of old and new policy noise, so only that of adapters is active in a training step; it
    is drawn from the seed, the step and the rank, and depends on nothing else.

    With several ranks every method is called by all of them, with as many rows on each. All means, whitening and the
    guard are over the minibatch of all ranks.

    Args:
        actor: causal language model with what trains it; it is called as `model(...)` only, so a booster may wrap it.
        critic: as the actor; None where advantages need no critic. One that is given all the same is left untouched.
        config: how to learn.
        device: of both models.
        ranks: who trains together; None takes torch.distributed's default group.
        ptx: demonstrations for `learn`; None where the caller hands them to `training_step`.
        seed: of the dropout.
        max_new_tokens: longest response, for the aggregation `constant_length`; None takes the configuration's, if it
            has one.
    """

    def __init__(
        self,
        actor: Trained,
        critic: Trained | None,
        config: LearningConfig,
        *,
        device: torch.device | str,
        ranks: Ranks | None = None,
        ptx: PtxSource | None = None,
        seed: int = 0,
        max_new_tokens: int | None = None,
    ) -> None:
        _check_options(config, has_critic=critic is not None)
        self.device = torch.device(device)
        self.config = config
        self.steps = 0
        """Optimizer steps taken or, by the guard, left out."""
        if critic is not None and config.advantage_estimator != "gae":
            logger.info("advantage estimator %s needs no critic; it stays as it is", config.advantage_estimator)
            critic = None
        self._roles = {"actor": actor} | ({} if critic is None else {"critic": critic})
        self._ranks = current_ranks() if ranks is None else ranks
        self._ptx = ptx
        self._seed = seed
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._line: ValueLine | None = None
        if max_new_tokens is None and isinstance(config, RolloutConfig):
            max_new_tokens = config.max_new_tokens
        self._longest = max_new_tokens
        for trained in self._roles.values():
            trained.model.eval()
            if config.gradient_checkpointing:
                checkpoint_activations(trained.model)

    @classmethod
    def build(
        cls,
        actor_model: PreTrainedModel,
        critic_model: Critic | None,
        config: PPOConfig,
        *,
        device: torch.device | str,
        ptx: PtxSource | None = None,
        seed: int = 0,
    ) -> Self:
        """Return a learner with AdamW, warm-up, and a plain booster of the current ranks.

        Args:
            actor_model: causal language model; its trainable weights are float32 (adapters or all).
            critic_model: as the actor; None where advantages need no critic.
            config: the run's configuration.
            device: where both models go.
            ptx: demonstrations; needed if `config.ptx_coef` is above 0.
            seed: of the dropout.
        """
        schedule = warmup_then_constant(config.warmup_steps)

        def train(model: nn.Module, lr: float) -> Trained:
            return make_trained(
                model.to(device),
                lr=lr,
                weight_decay=config.weight_decay,
                schedule=schedule,
                booster=PlainBooster(_PRECISIONS[config.dtype], max_norm=config.grad_clip),
            )

        critic = None if critic_model is None else train(critic_model, config.critic_lr)
        return cls(train(actor_model, config.lr), critic, config, device=device, ptx=ptx, seed=seed)

    @property
    def actor(self) -> Any:
        """The model that acts, as it was handed in or boosted."""
        return self._roles["actor"].model

    @property
    def critic(self) -> Any:
        """The model that values states, or None where none is trained."""
        return self._roles["critic"].model if "critic" in self._roles else None

    def learn(self, experience: Experience, seed: int, episode: int) -> list[PPOStats]:
        """Recompute the old log-probabilities, then make `config.max_epochs` passes over an episode's experience.

        With the correction `decoupled` they are recomputed before each pass: the trust region moves along.

        Args:
            experience: all of the episode, in the order of the samples' keys.
            seed: seed of the run.
            episode: from 0; with the seed it decides the order of passes after the first.
        """
        if self.config.ptx_coef > 0 and self._ptx is None:
            raise ConfigError(
                f"ppo.ptx_coef is {self.config.ptx_coef}, but there are no demonstrations; give some, or set it to 0"
            )
        batch = self.recompute(experience)
        stats = []
        for epoch in range(self.config.max_epochs):
            if epoch > 0 and self.config.correction == "decoupled":
                batch = self._with_logprobs(batch)
            size = self.config.train_batch_size
            for rows in minibatch_order(seed=seed, episode=episode, epoch=epoch, samples=len(batch), batch_size=size):
                ptx = None if self._ptx is None else self._ptx.batch(self.steps)
                stats.append(self.training_step(batch.select(rows), ptx))
        return stats

    def recompute(self, experience: Experience) -> Experience:
        """Return the experience with `action_log_probs` from this learner's own forward pass, on its device.

        The maker's numbers come from another dtype and batch; with them, the ratio would not start at 1. Cut into
        the micro-batches of the first pass, so that there it is 1 exactly.

        With `critic_init` reward_model the first call of a run also fits the critic's head to the returns of this
        experience, and restates what the critic said of it. Later calls do not: to recompute again what was restated,
        hand in what this returned.

        Raises:
            TrainingError: on all ranks, if any has no rows.
        """
        if self._ranks.any(not len(experience)):
            raise TrainingError("expected experience with at least one response on every rank, got none; collect some")
        return self._with_logprobs(self._with_rescaled_values(self._on_device(experience)))

    def training_step(self, experience: Experience, ptx: PaddedBatch | None = None) -> PPOStats:
        """Take one optimizer step on actor and critic from one minibatch; after an error, neither has taken it.

        Args:
            experience: this rank's rows of the minibatch, their `action_log_probs` recomputed.
            ptx: this rank's demonstrations; needed if `config.ptx_coef` is above 0.

        Raises:
            TrainingError: on all ranks, if there are no returns, response tokens or demonstrations on any, or a loss
                or gradient is not finite.
        """
        config = self.config
        if config.ptx_coef > 0 and self._ranks.any(ptx is None):
            raise TrainingError(f"ppo.ptx_coef is {config.ptx_coef}, but the step was given no demonstrations")
        batch = prepare(
            self._on_device(experience),
            config,
            ranks=self._ranks,
            longest=self._longest,
            with_critic="critic" in self._roles,
        )
        context = StepContext(config, self.device, self._dtype, self._ranks, self._seed, self.steps)
        figures = batch.figures | step_all(self._roles, batch, ptx, context)
        self.steps += 1
        return stats_from(figures)

    def state(self) -> LearnerState:
        """Return copies, in host memory, of all that a continuation to the bit needs."""
        state = state_tensors(self._roles, self.device)
        return LearnerState(state.tensors, state.facts | {_FACTS: self.facts()})

    def facts(self) -> dict[str, Any]:
        """Return, as JSON holds them, the facts that are in neither models, optimizers nor schedules."""
        return {"steps": self.steps, "value_line": None if self._line is None else self._line.facts()}

    def load_state(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from a state that `state` returned.

        Raises:
            ModelError: if it belongs to models of another form; nothing was changed.
        """
        kept = self.facts()
        self.load_facts(facts.get(_FACTS, {}))
        try:
            load_state_tensors(self._roles, tensors, facts, self.device)
        except ModelError:
            self.load_facts(kept)
            raise

    def load_facts(self, facts: Mapping[str, Any]) -> None:
        """Put back what `facts` returned, where models, optimizers and schedules come back on their own.

        Raises:
            ModelError: if they are incomplete; nothing was changed.
        """
        try:
            steps, line = int(facts["steps"]), facts["value_line"]
            value_line = None if line is None else ValueLine.from_facts(line)
        except (LookupError, TypeError, ValueError) as error:
            raise ModelError("the stored training state is incomplete: it lacks the learner's own facts") from error
        self.steps, self._line = steps, value_line

    def merged_weights(
        self, role: Literal["actor", "critic"], *, dtype: torch.dtype | None = None
    ) -> dict[str, torch.Tensor]:
        """Return all weights of actor or critic by the names that they have without adapters.

        Args:
            role: which model; a critic that does not exist has none.
            dtype: of the result; None keeps each weight's own.
        """
        if role not in self._roles:
            return {}
        return merged_parameters(unwrapped(self._roles[role].model), dtype=dtype)

    def _with_logprobs(self, batch: Experience) -> Experience:
        with torch.no_grad(), autocast(self.device, self._dtype):
            parts = [
                response_logprobs(
                    self.actor,
                    sequences=micro.sequences,
                    attention_mask=micro.attention_mask,
                    num_actions=micro.num_actions,
                    temperature=self.config.temperature,
                )
                for micro in batch.split(self.config.micro_batch_size)
            ]
        return batch.replace(action_log_probs=torch.where(batch.action_mask, torch.cat(parts), 0.0))

    def _with_rescaled_values(self, batch: Experience) -> Experience:
        if self.config.critic_init != "reward_model" or "critic" not in self._roles or self._line is not None:
            return batch
        line = fit_line(batch, gamma=self.config.gamma, ranks=self._ranks)
        rescale_head(self.critic, line)
        self._line = line
        return rescale_experience(batch, line, self.config)

    def _on_device(self, experience: Experience) -> Experience:
        batch = experience.replace()
        batch.to_device(self.device)
        return batch


def _check_options(config: LearningConfig, *, has_critic: bool) -> None:
    if config.advantage_estimator == "gae" and not has_critic:
        raise ConfigError(
            "ppo.advantage_estimator gae needs a critic, and there is none; give one, or compare samples with rloo, "
            "grpo, dr_grpo or reinforce_pp"
        )
    if config.legacy and config.critic_init == "reward_model":
        raise ConfigError(
            "ppo.legacy judges by rules of its own, to whose returns no critic is fitted; set ppo.critic_init to policy"
        )

"""The PPO learner: one optimizer step for actor and critic from one minibatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.buffer.order import minibatch_order
from rlhf_core.config import PPOConfig
from rlhf_core.errors import TrainingError
from rlhf_core.functional.advantages import explained_variance
from rlhf_core.functional.logprobs import entropy, logprobs_from_logits
from rlhf_core.functional.losses import policy_loss, value_loss
from rlhf_core.functional.masking import masked_sum
from rlhf_core.functional.moments import masked_whiten
from rlhf_core.models.actor import response_logits, response_logprobs
from rlhf_core.models.critic import Critic
from rlhf_core.models.device import autocast
from rlhf_core.models.lora import merged_parameters, set_adapter_dropout
from rlhf_core.trainer.optim import make_trained, take_step, warmup_then_constant
from rlhf_core.trainer.state import LearnerState, load_state_tensors, state_tensors
from rlhf_core.types import Experience


class PPOStats(NamedTuple):
    """One optimizer step in numbers; means are over the minibatch's response tokens."""

    actor_loss: float
    critic_loss: float
    clip_fraction: float
    """Share of tokens whose policy gradient the clip cut off."""
    value_clip_fraction: float
    """Share of tokens whose value gradient the clip cut off."""
    approx_kl: float
    """k3 estimate of KL(pi_old || pi) before the step, in nats per token."""
    entropy: float
    """Of the actor before the step, in nats per token."""
    explained_variance: float
    """How well the critic that made the experience predicted its returns."""
    actor_grad_norm: float
    """Before clipping."""
    critic_grad_norm: float
    actor_lr: float
    critic_lr: float


class PPOLearner:
    """Owns actor, critic, their optimizers and schedules; knows neither Ray nor where experience comes from.

    Both models stay in evaluation mode, as dropout would make the ratio of old and new policy noise; only the dropout
    of adapters is active in a training step.

    Args:
        actor: causal language model; its trainable weights are float32 (adapters or all).
        critic: as the actor.
        config: the run's configuration.
        device: where both models go.
    """

    def __init__(
        self, actor: PreTrainedModel, critic: Critic, config: PPOConfig, *, device: torch.device | str
    ) -> None:
        self.device = torch.device(device)
        self.actor = actor.to(self.device).eval()
        self.critic = critic.to(self.device).eval()
        self.config = config
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        schedule = warmup_then_constant(config.warmup_steps)
        self._actor_training = make_trained(
            self.actor, lr=config.lr, weight_decay=config.weight_decay, schedule=schedule
        )
        self._critic_training = make_trained(
            self.critic, lr=config.critic_lr, weight_decay=config.weight_decay, schedule=schedule
        )

    def learn(self, experience: Experience, *, seed: int, episode: int) -> list[PPOStats]:
        """Recompute the old log-probabilities, then make `config.max_epochs` passes over an episode's experience.

        Args:
            experience: all of the episode, in the order of the samples' keys.
            seed: seed of the run.
            episode: from 0; with the seed it decides the order of passes after the first.
        """
        experience = self.recompute(experience)
        return [
            self.training_step(experience.select(rows))
            for epoch in range(self.config.max_epochs)
            for rows in minibatch_order(
                seed=seed,
                episode=episode,
                epoch=epoch,
                samples=len(experience),
                batch_size=self.config.train_batch_size,
            )
        ]

    def recompute(self, experience: Experience) -> Experience:
        """Return the experience with `action_log_probs` from this learner's own forward pass, on its device.

        The maker's numbers come from another dtype and batch; with them, the ratio would not start at 1. Cut into
        the micro-batches of the first pass, so that there it is 1 exactly.
        """
        batch = self._on_device(experience)
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
        logprobs = torch.where(batch.action_mask, torch.cat(parts), 0.0)
        return batch.replace(action_log_probs=logprobs)

    def training_step(self, experience: Experience) -> PPOStats:
        """Take one optimizer step on the actor, then one on the critic, from one minibatch.

        Args:
            experience: the minibatch, its `action_log_probs` recomputed.

        Raises:
            TrainingError: if there are no returns or response tokens, or a loss or gradient is not finite.
        """
        batch = self._on_device(experience)
        tokens = int(batch.action_mask.sum())
        if batch.returns is None or not tokens:
            raise TrainingError("expected experience with returns and at least one response token, got none")
        explained = explained_variance(values=batch.values, returns=batch.returns, mask=batch.action_mask)
        whitened = masked_whiten(batch.advantages, batch.action_mask)
        micros = batch.replace(advantages=whitened).split(self.config.micro_batch_size)
        actor = self._step_actor(micros, tokens)
        critic = self._step_critic(micros, tokens)
        return PPOStats(**actor, **critic, explained_variance=explained.item())

    def state(self) -> LearnerState:
        """Return copies, in host memory, of all that a continuation to the bit needs."""
        return state_tensors({"actor": self._actor_training, "critic": self._critic_training}, self.device)

    def load_state(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from a state that `state` returned.

        Raises:
            ModelError: if it belongs to models of another form; nothing was changed.
        """
        roles = {"actor": self._actor_training, "critic": self._critic_training}
        load_state_tensors(roles, tensors, facts, self.device)

    def merged_weights(
        self, role: Literal["actor", "critic"], *, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Return all weights of actor or critic by the names that they have without adapters.

        Args:
            role: which model.
            dtype: of the result; None keeps each weight's own.
        """
        return merged_parameters(self.actor if role == "actor" else self.critic, dtype=dtype)

    def _step_actor(self, micros: Sequence[Experience], tokens: int) -> dict[str, float]:
        sums = torch.zeros(4, device=self.device)
        set_adapter_dropout(self.actor, active=True)
        for micro in micros:
            with autocast(self.device, self._dtype):
                logits = response_logits(
                    self.actor,
                    sequences=micro.sequences,
                    attention_mask=micro.attention_mask,
                    num_actions=micro.num_actions,
                )
            chosen = micro.sequences[:, -micro.num_actions :]
            policy = policy_loss(
                logprobs=logprobs_from_logits(logits, chosen, temperature=self.config.temperature),
                old_logprobs=micro.action_log_probs,
                advantages=micro.advantages,
                mask=micro.action_mask,
                denominator=tokens,
                clip_eps=self.config.eps_clip,
            )
            torch.autograd.backward(policy.loss)
            with torch.no_grad():
                spread = entropy(logits, temperature=self.config.temperature)
                mean_entropy = masked_sum(spread, micro.action_mask) / tokens
            sums += torch.stack([policy.loss.detach(), policy.clip_fraction, policy.approx_kl, mean_entropy])
        set_adapter_dropout(self.actor, active=False)
        lr = self._actor_training.scheduler.get_last_lr()[0]
        norm = take_step(self._actor_training, grad_clip=self.config.grad_clip, loss=sums[0], what="actor")
        named = dict(zip(("actor_loss", "clip_fraction", "approx_kl", "entropy"), sums.tolist(), strict=True))
        return named | {"actor_grad_norm": norm, "actor_lr": float(lr)}

    def _step_critic(self, micros: Sequence[Experience], tokens: int) -> dict[str, float]:
        sums = torch.zeros(2, device=self.device)
        set_adapter_dropout(self.critic, active=True)
        for micro in micros:
            with autocast(self.device, self._dtype):
                values = self.critic.response_values(
                    sequences=micro.sequences,
                    attention_mask=micro.attention_mask,
                    num_actions=micro.num_actions,
                )
            assert micro.returns is not None  # training_step has seen to it
            value = value_loss(
                values=values,
                old_values=micro.values,
                returns=micro.returns,
                mask=micro.action_mask,
                denominator=tokens,
                clip_eps=self.config.value_clip,
            )
            torch.autograd.backward(value.loss)
            sums += torch.stack([value.loss.detach(), value.clip_fraction])
        set_adapter_dropout(self.critic, active=False)
        lr = self._critic_training.scheduler.get_last_lr()[0]
        norm = take_step(self._critic_training, grad_clip=self.config.grad_clip, loss=sums[0], what="critic")
        loss, clip_fraction = sums.tolist()
        return {
            "critic_loss": loss,
            "value_clip_fraction": clip_fraction,
            "critic_grad_norm": norm,
            "critic_lr": float(lr),
        }

    def _on_device(self, experience: Experience) -> Experience:
        batch = experience.replace()
        batch.to_device(self.device)
        return batch

"""The PPO learner: one optimizer step for actor and critic from one minibatch, and what it refuses before it learns."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_core.config import LearningConfig, PPOConfig, RolloutConfig
from rlhf_core.errors import ConfigError, ModelError, TrainingError
from rlhf_core.generation import notes_suffice
from rlhf_core.kernels.compiled import used_on
from rlhf_core.models.adapted_linear import IN_TURN, JOINED
from rlhf_core.models.attention import attend_by_flash
from rlhf_core.models.compiled_layers import CompiledLayers
from rlhf_core.models.critic import Critic
from rlhf_core.models.lora import adapter_config, merged_parameters
from rlhf_core.models.shape import NO_LIMIT
from rlhf_core.models.token_tree import each_by_itself
from rlhf_core.ppo.critic_start import ValueLine, start_critic
from rlhf_core.ppo.metrics import PPOStats, stats_from
from rlhf_core.ppo.minibatch import prepare
from rlhf_core.ppo.order import Rows
from rlhf_core.ppo.ptx import PtxSource
from rlhf_core.ppo.step import StepContext, first_logprobs, step_all
from rlhf_core.strategy.ranks import ALONE, Ranks, current_ranks
from rlhf_core.training.boosted import awake, exact, keeps_layers, pass_cost, ranks_of, strategy_booster
from rlhf_core.training.micro_batches import AS_TREE, IN_SHORT_PASSES, PassCost
from rlhf_core.training.modes import check_passes, checkpoint_activations
from rlhf_core.training.optim import Trained, make_trained, warmup_then_constant
from rlhf_core.training.padding import PaddedBatch
from rlhf_core.training.state import LearnerState, load_state_tensors, state_tensors
from rlhf_core.types import Experience


def check_same(experience: Experience, ranks: Ranks) -> None:
    """See that every rank was handed the same rows, and that there are some.

    Raises:
        TrainingError: on all ranks, otherwise.
    """
    if ranks.any(not len(experience)):
        raise TrainingError("expected experience with at least one response on every rank, got none; collect some")
    digest = zlib.crc32(experience.sequences.cpu().contiguous().numpy().tobytes())
    if len(set(ranks.gather(torch.tensor([digest])).tolist())) > 1:
        raise TrainingError("expected all rows of the episode on every rank, got others on each; hand all the same")


def check_demonstrations(config: LearningConfig, *, has_some: bool) -> None:
    """See that there are demonstrations if any are to be learnt.

    Raises:
        ConfigError: otherwise.
    """
    if config.ptx_coef > 0 and not has_some:
        raise ConfigError(
            f"ppo.ptx_coef is {config.ptx_coef}, but there are no demonstrations; give some, or set it to 0"
        )


def check_options(config: LearningConfig, *, has_critic: bool) -> None:
    """See that the choices go together.

    Raises:
        ConfigError: otherwise.
    """
    if config.advantage_estimator == "gae" and not has_critic:
        raise ConfigError(
            "ppo.advantage_estimator gae needs a critic, and there is none; give one, or compare samples with rloo, "
            "grpo, dr_grpo or reinforce_pp"
        )
    if config.legacy and config.critic_init == "reward_model":
        raise ConfigError(
            "ppo.legacy judges by rules of its own, to whose returns no critic is fitted; set ppo.critic_init to policy"
        )


__all__ = ["PPOLearner", "PPOStats"]

logger = logging.getLogger(__name__)

_FACTS = "learner"


class PPOLearner:
    """Owns actor, critic, their optimizers and schedules; knows neither Ray nor where experience comes from.

    Dropout would make the ratio of old and new policy noise, so only that of adapters is active in a training step; it
    is drawn from the seed, the step and the rank, and depends on nothing else.

    With several ranks every method is called by all of them. All means, whitening and the guard are over the minibatch
    of all ranks.

    Args:
        actor: causal language model with what trains it; it is called as `model(...)` only, so a booster may wrap it.
        critic: as the actor; None where advantages need no critic. One that is given all the same is left untouched.
        config: how to learn.
        device: of both models.
        ranks: who trains together; None takes torch.distributed's default group.
        ptx: demonstrations for `learn`; None where the caller hands them to `training_step`.
        seed: of the dropout.
        max_new_tokens: longest response, for the aggregation `constant_length`; None takes the configuration's.
        apart: actor and critic learn in two processes, from the same experience; here one of them is None.
    """

    def __init__(
        self,
        actor: Trained | None,
        critic: Trained | None,
        config: LearningConfig,
        *,
        device: torch.device | str,
        ranks: Ranks | None = None,
        ptx: PtxSource | None = None,
        seed: int = 0,
        max_new_tokens: int | None = None,
        apart: bool = False,
    ) -> None:
        check_options(config, has_critic=critic is not None or apart)
        self.device = torch.device(device)
        check_passes(config, self.device)
        self.config = config
        self.steps = 0
        """Optimizer steps taken or, by the guard, left out."""
        if critic is not None and config.advantage_estimator != "gae":
            logger.info("advantage estimator %s needs no critic; it stays as it is", config.advantage_estimator)
            critic = None
        self._roles = {role: each for role, each in (("actor", actor), ("critic", critic)) if each is not None}
        wanted = [name for name in ("compile_layers", "flash_attention") if getattr(config, name)]
        if wanted and not all(keeps_layers(each.booster) for each in self._roles.values()):
            raise ConfigError(
                f"{config.STAGE}.{wanted[0]} needs layers that no booster changes; give boosters of plain or ddp, or "
                "set it to false"
            )
        self.ranks = current_ranks() if ranks is None else ranks
        self.ptx = ptx
        self._seed = seed
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._line: ValueLine | None = None
        if max_new_tokens is None and isinstance(config, RolloutConfig):
            max_new_tokens = config.max_new_tokens
        self._longest = max_new_tokens
        costs = [pass_cost(each.booster, each.model, self.device) for each in self._roles.values()]
        self._cost = PassCost(
            max(cost.tokens for cost in costs), all(cost.is_tree for cost in costs), max(cost.most for cost in costs)
        )
        self._rows: str | None = IN_SHORT_PASSES
        """How micro-batches are cut; None: in the order of their rows, each computed by itself, as before 0.3."""
        for trained in self._roles.values():
            trained.model.eval()
            if config.gradient_checkpointing:
                checkpoint_activations(trained.model)
            if config.flash_attention:
                attend_by_flash(trained.model)
        self._compiled = [CompiledLayers(each.model) for each in self._roles.values() if config.compile_layers]

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
        ranks: Ranks | None = None,
    ) -> Self:
        """Return a learner with AdamW, warm-up, and boosters of `config.strategy`, one for each model.

        Args:
            actor_model: causal language model; its trainable weights are float32 (adapters or all).
            critic_model: as the actor; None where advantages need no critic.
            config: the run's configuration.
            device: where both models go.
            ptx: demonstrations; needed if `config.ptx_coef` is above 0.
            seed: of the dropout.
            ranks: who trains together; None takes torch.distributed's default group.

        Raises:
            ConfigError: if the strategy cannot be had here.
        """
        ranks = ranks_of(config, ranks)
        schedule = warmup_then_constant(config.warmup_steps)
        accumulates = config.train_batch_size > config.micro_batch_size or config.ptx_coef > 0

        def train(model: nn.Module, lr: float) -> Trained:
            return make_trained(
                model.to(device),
                lr=lr,
                weight_decay=config.weight_decay,
                schedule=schedule,
                booster=strategy_booster(
                    config.strategy, dtype=getattr(torch, config.dtype), max_norm=config.grad_clip, device=device,
                    ranks=ranks, accumulates=accumulates,
                ),
            )  # fmt: skip

        critic = None if critic_model is None else train(critic_model, config.critic_lr)
        return cls(train(actor_model, config.lr), critic, config, device=device, ranks=ranks, ptx=ptx, seed=seed)

    @property
    def actor(self) -> Any:
        """The model that acts, as it was handed in or boosted."""
        return self._roles["actor"].model

    @property
    def critic(self) -> Any:
        """The model that values states, or None where none is trained."""
        return self._roles["critic"].model if "critic" in self._roles else None

    def awake(self) -> AbstractContextManager[None]:
        """Return the context in which all weights of both plain models are there; nothing is learnt in it."""
        return awake((trained.booster, trained.model) for trained in self._roles.values())

    def demonstrations(self) -> PaddedBatch | None:
        """Return this rank's demonstrations of the next step, where the learner was built with some."""
        return None if self.ptx is None else self.ptx.batch(self.steps)

    def recompute(
        self,
        experience: Experience,
        minibatches: Sequence[Rows] | None = None,
        *,
        shared: bool = False,
        is_own: bool = False,
    ) -> Experience:
        """Return experience, on the learner's device, with `action_log_probs` of its own weights.

        They are from its own forward pass: the maker's come from another dtype and batch, and with them, the ratio
        would not start at 1. The rows are cut as in the first pass, so that there it is 1 exactly. Only in float32 the
        maker's stay, of rows that the learner's weights sampled: the ratio then starts at 1 but for rounding.

        With `critic_init` reward_model the first call of a run also fits the critic's head to the returns of this
        experience, and restates what the critic said of it. Later calls do not: to recompute again what was restated,
        hand in what this returned.

        Args:
            experience: this rank's rows; or all rows, the same on every rank, of which each recomputes its share.
            minibatches: rows of each step of the first pass; None learns all in one step.
            shared: whether all ranks have all rows.
            is_own: whether the weights that are learnt now sampled all rows, those of all ranks.

        Raises:
            TrainingError: on all ranks, if any has no rows.
        """
        if self.ranks.any(not len(experience)):
            raise TrainingError("expected experience with at least one response on every rank, got none; collect some")
        with self._passes():
            batch = self._with_rescaled_values(self._on_device(experience), ALONE if shared else self.ranks)
            if "actor" not in self._roles or (is_own and self._takes_notes):
                return batch
            steps = [np.arange(len(batch))] if minibatches is None else minibatches
            own = first_logprobs(self._roles["actor"], batch, steps, self.ranks if shared else ALONE, self._context())
        return batch.replace(action_log_probs=own)

    def training_step(self, experience: Experience, ptx: PaddedBatch | None = None) -> PPOStats:
        """Take one optimizer step on actor and critic from one minibatch; after an error, neither has taken it.

        Where every response of it abstains, on all ranks, there is none but that of the demonstrations.

        Args:
            experience: this rank's rows of the minibatch, their `action_log_probs` by `recompute`; none if others have.
            ptx: this rank's demonstrations; needed if `config.ptx_coef` is above 0.

        Raises:
            TrainingError: on all ranks, if there are no returns or demonstrations on any, or a loss or gradient is
                not finite.
        """
        config = self.config
        if config.ptx_coef > 0 and self.ranks.any(ptx is None):
            raise TrainingError(f"ppo.ptx_coef is {config.ptx_coef}, but the step was given no demonstrations")
        batch = prepare(
            self._on_device(experience),
            config,
            ranks=self.ranks,
            longest=self._longest,
            cost=self._cost_as_begun,
            with_critic="critic" in self._roles,
        )
        with self._passes():
            figures = batch.figures | step_all(self._roles, batch, ptx, self._context())
        self.steps += 1
        return stats_from(figures)

    def state(self, *, copied: bool = True) -> LearnerState:
        """Return, in host memory, all that a continuation to the bit needs; tensors on the first rank.

        Args:
            copied: False: some tensors may be the learner's own, which its next step changes.
        """
        state = state_tensors(self._roles, self.device, self.ranks, copied=copied)
        return LearnerState(state.tensors, state.facts | {_FACTS: self.facts()})

    def facts(self) -> dict[str, Any]:
        """Return, as JSON holds them, the facts that are in neither models, optimizers nor schedules.

        `adapters` tells how sets of adapters are computed, `kernels` with what library rollouts are made on this
        machine: where these differ, so do last bits. `rows` tells how micro-batches are cut and computed.
        """
        line = None if self._line is None else self._line.facts()
        lora = next((adapter_config(trained.model) for trained in self._roles.values()), None)
        form = None if lora is None else IN_TURN if lora.dropout else JOINED
        return {
            "steps": self.steps, "value_line": line, "adapters": form, "kernels": used_on(self.device),
            "rows": self._rows,
        }  # fmt: skip

    def load_state(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from a state that `state` returned, under this strategy or another, with as many ranks or others.

        Args:
            tensors: all of them, on every rank.
            facts: as they were, or read back from JSON.

        Raises:
            ModelError: if it belongs to models of another form; nothing was changed.
        """
        kept = self.facts()
        self.load_facts(facts.get(_FACTS, {}))
        try:
            load_state_tensors(self._roles, tensors, facts, self.device, self.ranks)
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
        self._rows = facts.get("rows")  # as a run goes on that an earlier release began

    def merged_weights(
        self, role: Literal["actor", "critic"], *, dtype: torch.dtype | None = None
    ) -> dict[str, torch.Tensor]:
        """Return all weights of actor or critic by the names that they have without adapters; on the first rank alone.

        Args:
            role: which model; a critic that does not exist has none.
            dtype: of the result; None keeps each weight's own.
        """
        if role not in self._roles:
            return {}
        model, _, _, booster = self._roles[role]
        with exact(booster, model) as whole:
            return {} if whole is None else merged_parameters(whole, dtype=dtype)

    def exact(self, role: Literal["actor", "critic"]) -> AbstractContextManager[Any]:
        """Return the context of the plain model with its exact weights on the first rank, of None on the others."""
        return exact(self._roles[role].booster, self._roles[role].model)

    def trained(self, role: Literal["actor", "critic"]) -> Trained | None:
        """Return actor or critic with what trains it; None where there is no such model."""
        return self._roles.get(role)

    @property
    def _cost_as_begun(self) -> PassCost | None:
        if self._rows is None:
            return None
        return self._cost._replace(most=NO_LIMIT) if self._rows == AS_TREE else self._cost

    @property
    def _takes_notes(self) -> bool:
        config, is_of_this_release = self.config, self._rows == IN_SHORT_PASSES
        if config.dtype != "float32" or config.correction != "none" or not is_of_this_release:
            return False
        return notes_suffice(config, config, self.actor)

    @contextmanager
    def _passes(self) -> Iterator[None]:
        """Run the block with passes as they were when the run began, and as they are configured."""
        with ExitStack() as contexts:
            if self._rows is None:
                contexts.enter_context(each_by_itself())
            for layers in self._compiled:
                contexts.enter_context(layers.in_use())
            yield

    def _context(self) -> StepContext:
        return StepContext(
            self.config, self.device, self._dtype, self.ranks, self._seed, self.steps, self._cost_as_begun
        )

    def _with_rescaled_values(self, batch: Experience, sharing: Ranks) -> Experience:
        """Fit the critic's head, where that is due, to the batch that these ranks share, if any of it was judged."""
        if self.config.critic_init != "reward_model" or "critic" not in self._roles or self._line is not None:
            return batch
        if not sharing.sum(batch.action_mask.sum()):
            return batch
        self._line, batch = start_critic(self._roles["critic"], batch, self.config, sharing=sharing, ranks=self.ranks)
        return batch

    def _on_device(self, experience: Experience) -> Experience:
        batch = experience.replace()
        batch.to_device(self.device)
        return batch

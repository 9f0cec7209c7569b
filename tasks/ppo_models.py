"""Builds the models of a PPO run, inside the actors' own processes."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.config import PipelineConfig
from rlhf_core.ppo.best import DEVELOPMENT
from tasks.context import Context, actors_context, materialise
from tasks.models import load_frozen, load_own, load_reward_model, opened_base, write_base
from tasks.results import PPORun

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlhf_core.data import Problem, PromptTemplate
    from rlhf_core.models.critic import Critic
    from rlhf_core.models.reward_model import RewardModel
    from rlhf_core.ppo.learner import PPOLearner
    from rlhf_core.ppo.ptx import Demonstrations
    from rlhf_core.rewards.verifying import Judge
    from rlhf_core.rollout.experience import ExperienceMaker


class LearnerFactory:
    """Builds the learner from the run's references: actor, critic where advantages need one, demonstrations."""

    def __init__(self, run: PPORun) -> None:
        self._run = run

    def __call__(self) -> PPOLearner:
        """Return the learner at its starting weights."""
        import torch

        from rlhf_core.models.loading import default_device
        from rlhf_core.ppo.learner import PPOLearner

        config = self._run.config
        device = default_device()
        torch.manual_seed(config.seed)
        arithmetic = config.ppo.dtype if self._run.shares_base else "float32"
        context = actors_context(None)
        actor = _policy(context, self._run, arithmetic)
        critic = _critic(context, self._run, actor, arithmetic, own_dtype="float32")
        _attach_lora(config, actor, critic)
        ptx = _demonstrations(context, self._run)
        return PPOLearner.build(actor, critic, config.ppo, device=device, ptx=ptx, seed=config.seed)


class MakerFactory:
    """Builds an experience maker: actor and critic for published weights, scorer, initial model."""

    def __init__(self, run: PPORun) -> None:
        self._run = run

    def __call__(self) -> ExperienceMaker:
        """Return the maker with the weights of version 0."""
        from rlhf_core.data import PromptTemplate
        from rlhf_core.models.loading import default_device, load_tokenizer
        from rlhf_core.rewards.scoring import build_scorer
        from rlhf_core.rewards.verifying import asks_for_answers, judge_of
        from rlhf_core.rollout.experience import ExperienceMaker

        run, config, context = self._run, self._run.config, actors_context(None)
        dtype, device = config.ppo.rollout_dtype, default_device()
        scores = config.ppo.reward.reward_model > 0
        reward_model = _reward_model(context, run, dtype).to(device) if scores else None
        actor = _policy(context, run, dtype)
        critic = _critic(context, run, actor, dtype, own_dtype=dtype)
        if config.ppo.sends_adapters:
            _attach_lora(config, actor, critic)
        template = PromptTemplate(load_tokenizer(materialise(context, run.actor)), config.template)
        allowed = context.settings.reward_modules
        judge = judge_of(config, template=template, allowed_modules=allowed) if asks_for_answers(config.data) else None
        return ExperienceMaker(
            actor=actor,
            critic=None if critic is None else critic.to(device),
            scorer=build_scorer(
                config.ppo.reward,
                reward_model,
                template=template,
                judge=judge,
                allowed_modules=allowed,
                scaled=not config.ppo.legacy,
            ),
            # without one it is the actor, PPO's adapters off
            initial_model=None if run.shares_base else _policy(context, run, dtype),
            template=template,
            config=config.ppo,
            seed=config.seed,
            legacy_form="detached",
        )


class Development:
    """Measures the policy on the dataset's development split: greedy answers, judged as the evaluation's are."""

    def __init__(self, run: PPORun) -> None:
        self._run = run

    def __call__(self, actor: PreTrainedModel) -> dict[str, float]:
        """Return what share of the answers is right, or the judging reward model's mean score, and their form.

        Args:
            actor: with its exact weights.
        """
        from rlhf_core.evaluation import check_judged, evaluate_policy, judged

        config, (template, problems, judge) = self._run.config, self._parts
        outcomes = evaluate_policy(actor, template, problems, config.evaluation, judge)
        check_judged(
            outcomes,
            judge=config.evaluation.judge,
            most=config.ppo.max_abstained,
            what="answers of the development split",
        )
        outcomes = judged(outcomes)
        count, by_model = len(outcomes), config.evaluation.judge == "reward_model"
        return {
            DEVELOPMENT: sum(each.score if by_model else each.correct for each in outcomes) / count,
            f"{DEVELOPMENT}_well_formed": sum(each.well_formed for each in outcomes) / count,
        }

    @cached_property
    def _parts(self) -> tuple[PromptTemplate, list[Problem], Judge | RewardModel]:
        """Build what measuring takes, in the process of the trainer, which ends with the run."""
        from rlhf_core.data import PromptTemplate, problems_from_jsonl
        from rlhf_core.models.loading import default_device, load_tokenizer
        from rlhf_core.rewards.verifying import judge_of

        run, config, context = self._run, self._run.config, actors_context(None)
        template = PromptTemplate(load_tokenizer(materialise(context, run.actor)), config.template)
        problems = problems_from_jsonl((materialise(context, run.dataset) / f"{DEVELOPMENT}.jsonl").read_bytes())
        if config.evaluation.judge == "reward_model":
            return template, problems, _reward_model(context, run, "float32").to(default_device())
        judge = judge_of(config, template=template, allowed_modules=context.settings.reward_modules)
        assert judge is not None  # the evaluation has one
        return template, problems, judge


class PolicySaver:
    """Writes the finished policy: its adapters, or a whole model that transformers loads, adapters merged."""

    def __init__(self, run: PPORun) -> None:
        self._run = run

    def __call__(self, actor: PreTrainedModel, directory: Path) -> None:
        """Write the policy with its tokenizer.

        Args:
            actor: with its exact weights.
            directory: where it goes.
        """
        from rlhf_core.models.adapters import save_adapters
        from rlhf_core.models.loading import load_tokenizer, save_weights
        from rlhf_core.models.lora import merged_parameters

        tokenizer = load_tokenizer(materialise(actors_context(None), self._run.actor))
        if not self._run.shares_base:
            save_weights(actor.config, merged_parameters(actor), tokenizer, directory)
            return
        assert self._run.base is not None  # which is what is shared
        save_adapters(actor, directory, base=self._run.base.uri)
        write_base(directory, self._run.base)
        tokenizer.save_pretrained(directory)


def _policy(context: Context, run: PPORun, dtype: str) -> PreTrainedModel:
    """Return the policy that the run began from: frozen, over the base that all share, or in memory of its own."""
    from rlhf_core.models.loading import default_device

    base = run.base or run.actor
    if not run.shares_base:
        return load_own(context, run.actor, base, dtype)
    copy = opened_base(context, base, run.config.ppo.rollout_dtype)
    return load_frozen(context, run.actor, copy, dtype, device=default_device())


def _critic(context: Context, run: PPORun, actor: PreTrainedModel, arithmetic: str, *, own_dtype: str) -> Critic | None:
    """Return the critic, or None where advantages compare samples with each other.

    Args:
        context: the open context.
        run: the run.
        actor: with whose base, as far as it is shared, a critic that starts from the policy goes on.
        arithmetic: of a critic over a shared base.
        own_dtype: of a critic with a transformer of its own.
    """
    from rlhf_core.models.base import over_same_weights
    from rlhf_core.models.critic import Critic
    from rlhf_core.models.trunk import trunk_of

    config = run.config.ppo
    if config.advantage_estimator != "gae":
        return None
    if config.critic_init != "reward_model":
        return Critic(over_same_weights(trunk_of(actor))) if run.shares_base else Critic.from_causal_lm(actor)
    if run.shares_base and run.reward_model != run.reward_model_base:  # adapters, loaded for this critic alone
        model = _reward_model(context, run, arithmetic)
        return Critic(model.trunk, model.head)
    return Critic.from_reward_model(_reward_model(context, run, own_dtype), keep_head=True)


def _attach_lora(config: PipelineConfig, actor: PreTrainedModel, critic: Critic | None) -> None:
    """Put the run's adapters on both models, if it has any; a critic may have those of the reward model."""
    from rlhf_core.models.lora import adapter_config, attach_lora

    if config.ppo.lora is None:
        return
    attach_lora(actor, config.ppo.lora, seed=config.seed)
    if critic is not None and adapter_config(critic.trunk) is None:
        attach_lora(critic.trunk, config.ppo.lora, seed=config.seed)


def _reward_model(context: Context, run: PPORun, dtype: str) -> RewardModel:
    assert run.reward_model is not None  # the plan has checked this
    base = run.reward_model_base or run.reward_model
    rollout = run.config.ppo.rollout_dtype
    return load_reward_model(context, run.reward_model, base, dtype, copied_for=rollout, merged=not run.shares_base)


def _demonstrations(context: Context, run: PPORun) -> Demonstrations | None:
    """Return the dataset's demonstrations for SFT, where the policy learns them beside PPO."""
    from rlhf_core.data import PromptTemplate, problems_from_jsonl
    from rlhf_core.data.encoding import encode_demonstrations
    from rlhf_core.models.loading import default_device, load_tokenizer
    from rlhf_core.ppo.ptx import Demonstrations
    from rlhf_core.training.boosted import ranks_of

    config = run.config
    if config.ppo.ptx_coef == 0:
        return None
    template = PromptTemplate(load_tokenizer(materialise(context, run.actor)), config.template)
    problems = problems_from_jsonl((materialise(context, run.dataset) / "sft.jsonl").read_bytes())
    examples = encode_demonstrations(problems, template)
    return Demonstrations(
        examples, batch_size=config.ppo.ptx_batch_size, seed=config.seed, device=default_device(),
        ranks=ranks_of(config.ppo, None),
    )  # fmt: skip

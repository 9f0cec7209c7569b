"""Builds the models of a PPO run, inside the actors' own processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import PipelineConfig
from tasks.context import Context, materialise
from tasks.results import Parent, PPORun

if TYPE_CHECKING:
    from rlhf_core.experience_maker.maker import ExperienceMaker
    from rlhf_core.trainer.ppo_learner import PPOLearner


class LearnerFactory:
    """Builds the learner from the run's references: actor, and a critic on the same trunk with a zero head."""

    def __init__(self, run: PPORun) -> None:
        self._run = run

    def __call__(self) -> PPOLearner:
        """Return the learner at its starting weights."""
        import torch

        from rlhf_core.models.critic import Critic
        from rlhf_core.models.loading import default_device, load_causal_lm
        from rlhf_core.models.lora import attach_lora
        from rlhf_core.trainer.ppo_learner import PPOLearner

        config = _config(self._run)
        directory = _directory(self._run.actor)
        device = default_device()
        torch.manual_seed(config.seed)  # dropout of the adapters
        actor = load_causal_lm(directory, "float32", device=device)
        critic = Critic.from_causal_lm(actor)
        if config.ppo.lora is not None:
            attach_lora(actor, config.ppo.lora, seed=config.seed)
            attach_lora(critic.trunk, config.ppo.lora, seed=config.seed)
        return PPOLearner.build(actor, critic, config.ppo, device=device, seed=config.seed)


class MakerFactory:
    """Builds an experience maker: actor and critic for published weights, reward model, initial model."""

    def __init__(self, run: PPORun) -> None:
        self._run = run

    def __call__(self) -> ExperienceMaker:
        """Return the maker with the weights of version 0."""
        import torch

        from rlhf_core.data import PromptTemplate
        from rlhf_core.experience_maker.maker import ExperienceMaker
        from rlhf_core.models.critic import Critic
        from rlhf_core.models.loading import default_device, load_causal_lm, load_tokenizer
        from rlhf_core.models.reward_model import RewardModel
        from rlhf_core.rewards.scoring import build_scorer

        config = _config(self._run)
        directory, dtype, device = _directory(self._run.actor), config.ppo.rollout_dtype, default_device()
        reward_model = None
        if self._run.reward_model is not None:
            reward_model = RewardModel.from_pretrained(_directory(self._run.reward_model), getattr(torch, dtype)).to(
                device
            )

        def model() -> Any:
            return load_causal_lm(directory, dtype, device=device)

        template = PromptTemplate(load_tokenizer(directory), config.template)
        return ExperienceMaker(
            actor=model(),
            critic=Critic.from_causal_lm(model()),
            scorer=build_scorer(config.ppo.reward, reward_model, template=template),
            initial_model=model(),
            template=template,
            config=config.ppo,
            seed=config.seed,
        )


class PolicySaver:
    """Writes the finished policy, adapters merged, as a directory that transformers loads."""

    def __init__(self, run: PPORun) -> None:
        self._run = run

    def __call__(self, learner: PPOLearner, directory: Path) -> None:
        """Write weights, configuration and tokenizer to `directory`."""
        from rlhf_core.models.loading import load_tokenizer, save_weights

        source = _directory(self._run.actor)
        save_weights(learner.actor.config, learner.merged_weights("actor"), load_tokenizer(source), directory)


def _config(run: PPORun) -> PipelineConfig:
    return PipelineConfig.model_validate(run.config)


def _directory(parent: Parent) -> Path:
    from infra.artifacts import open_default_store
    from infra.settings import settings

    return materialise(Context(open_default_store(), settings(), None), parent)

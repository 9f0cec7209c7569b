"""The learning; knows no orchestrator.

The public names below are loaded when they are first used: importing this package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_core.buffer.naive import NaiveExperienceBuffer
    from rlhf_core.experience_maker.naive import NaiveExperienceMaker
    from rlhf_core.models.critic import Critic
    from rlhf_core.models.reward_model import RewardModel
    from rlhf_core.trainer.ppo_learner import PPOLearner, PPOStats
    from rlhf_core.trainer.reward_model import train_reward_model
    from rlhf_core.trainer.sft import train_sft
    from rlhf_core.types import Experience, Sample

__all__ = [
    "Critic",
    "Experience",
    "NaiveExperienceBuffer",
    "NaiveExperienceMaker",
    "PPOLearner",
    "PPOStats",
    "RewardModel",
    "Sample",
    "train_reward_model",
    "train_sft",
]

_HOMES = {
    "Critic": "rlhf_core.models.critic",
    "Experience": "rlhf_core.types",
    "NaiveExperienceBuffer": "rlhf_core.buffer.naive",
    "NaiveExperienceMaker": "rlhf_core.experience_maker.naive",
    "PPOLearner": "rlhf_core.trainer.ppo_learner",
    "PPOStats": "rlhf_core.trainer.ppo_learner",
    "RewardModel": "rlhf_core.models.reward_model",
    "Sample": "rlhf_core.types",
    "train_reward_model": "rlhf_core.trainer.reward_model",
    "train_sft": "rlhf_core.trainer.sft",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

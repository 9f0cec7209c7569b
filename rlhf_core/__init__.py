"""The learning; knows no orchestrator.

The public names below are loaded when they are first used: importing this package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_core.buffer.naive import NaiveExperienceBuffer
    from rlhf_core.config import PPOOptions
    from rlhf_core.data.conversation import Conversation, encode_conversation, setup_conversation_template
    from rlhf_core.data.loaders import (
        DataCollatorForPromptDataset,
        DataCollatorForSupervisedDataset,
        StatefulDistributedSampler,
    )
    from rlhf_core.detached.coati.factories import (
        get_actor_from_args,
        get_critic_from_args,
        get_model_numel,
        get_rank,
        get_reward_model_from_args,
        get_strategy_from_args,
        get_tokenizer_from_args,
        get_world_size,
        is_rank_0,
        set_dist_env,
    )
    from rlhf_core.detached.coati.fit_dealing import DealingOptions
    from rlhf_core.detached.coati.holder import ExperienceMakerHolder
    from rlhf_core.detached.coati.learner_building import LearningOptions
    from rlhf_core.detached.coati.lora import LoRAConstructor, state_dict_to
    from rlhf_core.detached.coati.receivers import get_receivers_per_sender
    from rlhf_core.detached.coati.replay_buffer import DetachedReplayBuffer
    from rlhf_core.detached.coati.trainer_base import DetachedTrainer
    from rlhf_core.detached.coati.trainer_ppo import DetachedPPOTrainer
    from rlhf_core.experience_maker.maker import ExperienceMaker
    from rlhf_core.experience_maker.naive import NaiveExperienceMaker
    from rlhf_core.models.critic import Critic
    from rlhf_core.models.loss import GPTLMLoss, LogExpLoss, LogSigLoss, PolicyLoss, ValueLoss
    from rlhf_core.models.reward_model import RewardModel
    from rlhf_core.rewards.functions import gsm8k_reward_fn, math_competition_reward_fn
    from rlhf_core.rewards.model import RLVRRewardModel
    from rlhf_core.rewards.structure import validate_response_structure
    from rlhf_core.strategy.booster import Booster
    from rlhf_core.strategy.plain import PlainBooster
    from rlhf_core.strategy.strategy import Strategy, make_strategy
    from rlhf_core.trainer.callbacks import Callback, MakerCallback, TrainerCallback
    from rlhf_core.trainer.evaluators import (
        ExperienceMakerPerformanceEvaluator,
        PerformanceEvaluator,
        TrainerPerformanceEvaluator,
    )
    from rlhf_core.trainer.ppo.learner import PPOLearner
    from rlhf_core.trainer.ppo.ol_trainer import OLTrainer
    from rlhf_core.trainer.ppo.stats import PPOStats
    from rlhf_core.trainer.ppo.trainer import PPOTrainer
    from rlhf_core.trainer.supervised.collator import DataCollatorForPreferenceDataset
    from rlhf_core.trainer.supervised.reward_model import RewardModelTrainer, train_reward_model
    from rlhf_core.trainer.supervised.sft import SFTTrainer, train_sft
    from rlhf_core.types import Experience, Sample

__all__ = [
    "Booster",
    "Callback",
    "Conversation",
    "Critic",
    "DataCollatorForPreferenceDataset",
    "DataCollatorForPromptDataset",
    "DataCollatorForSupervisedDataset",
    "DealingOptions",
    "DetachedPPOTrainer",
    "DetachedReplayBuffer",
    "DetachedTrainer",
    "Experience",
    "ExperienceMaker",
    "ExperienceMakerHolder",
    "ExperienceMakerPerformanceEvaluator",
    "GPTLMLoss",
    "LearningOptions",
    "LoRAConstructor",
    "LogExpLoss",
    "LogSigLoss",
    "MakerCallback",
    "NaiveExperienceBuffer",
    "NaiveExperienceMaker",
    "OLTrainer",
    "PPOLearner",
    "PPOOptions",
    "PPOStats",
    "PPOTrainer",
    "PerformanceEvaluator",
    "PlainBooster",
    "PolicyLoss",
    "RLVRRewardModel",
    "RewardModel",
    "RewardModelTrainer",
    "SFTTrainer",
    "Sample",
    "StatefulDistributedSampler",
    "Strategy",
    "TrainerCallback",
    "TrainerPerformanceEvaluator",
    "ValueLoss",
    "encode_conversation",
    "get_actor_from_args",
    "get_critic_from_args",
    "get_model_numel",
    "get_rank",
    "get_receivers_per_sender",
    "get_reward_model_from_args",
    "get_strategy_from_args",
    "get_tokenizer_from_args",
    "get_world_size",
    "gsm8k_reward_fn",
    "is_rank_0",
    "make_strategy",
    "math_competition_reward_fn",
    "set_dist_env",
    "setup_conversation_template",
    "state_dict_to",
    "train_reward_model",
    "train_sft",
    "validate_response_structure",
]

_HOMES = {
    "Booster": "rlhf_core.strategy.booster",
    "Callback": "rlhf_core.trainer.callbacks",
    "Conversation": "rlhf_core.data.conversation",
    "Critic": "rlhf_core.models.critic",
    "DataCollatorForPreferenceDataset": "rlhf_core.trainer.supervised.collator",
    "DataCollatorForPromptDataset": "rlhf_core.data.loaders",
    "DataCollatorForSupervisedDataset": "rlhf_core.data.loaders",
    "DealingOptions": "rlhf_core.detached.coati.fit_dealing",
    "DetachedPPOTrainer": "rlhf_core.detached.coati.trainer_ppo",
    "DetachedReplayBuffer": "rlhf_core.detached.coati.replay_buffer",
    "DetachedTrainer": "rlhf_core.detached.coati.trainer_base",
    "Experience": "rlhf_core.types",
    "ExperienceMaker": "rlhf_core.experience_maker.maker",
    "ExperienceMakerHolder": "rlhf_core.detached.coati.holder",
    "ExperienceMakerPerformanceEvaluator": "rlhf_core.trainer.evaluators",
    "GPTLMLoss": "rlhf_core.models.loss",
    "LearningOptions": "rlhf_core.detached.coati.learner_building",
    "LoRAConstructor": "rlhf_core.detached.coati.lora",
    "LogExpLoss": "rlhf_core.models.loss",
    "LogSigLoss": "rlhf_core.models.loss",
    "MakerCallback": "rlhf_core.trainer.callbacks",
    "NaiveExperienceBuffer": "rlhf_core.buffer.naive",
    "NaiveExperienceMaker": "rlhf_core.experience_maker.naive",
    "OLTrainer": "rlhf_core.trainer.ppo.ol_trainer",
    "PPOLearner": "rlhf_core.trainer.ppo.learner",
    "PPOOptions": "rlhf_core.config",
    "PPOStats": "rlhf_core.trainer.ppo.stats",
    "PPOTrainer": "rlhf_core.trainer.ppo.trainer",
    "PerformanceEvaluator": "rlhf_core.trainer.evaluators",
    "PlainBooster": "rlhf_core.strategy.plain",
    "PolicyLoss": "rlhf_core.models.loss",
    "RLVRRewardModel": "rlhf_core.rewards.model",
    "RewardModel": "rlhf_core.models.reward_model",
    "RewardModelTrainer": "rlhf_core.trainer.supervised.reward_model",
    "SFTTrainer": "rlhf_core.trainer.supervised.sft",
    "Sample": "rlhf_core.types",
    "StatefulDistributedSampler": "rlhf_core.data.loaders",
    "Strategy": "rlhf_core.strategy.strategy",
    "TrainerCallback": "rlhf_core.trainer.callbacks",
    "TrainerPerformanceEvaluator": "rlhf_core.trainer.evaluators",
    "ValueLoss": "rlhf_core.models.loss",
    "encode_conversation": "rlhf_core.data.conversation",
    "get_actor_from_args": "rlhf_core.detached.coati.factories",
    "get_critic_from_args": "rlhf_core.detached.coati.factories",
    "get_model_numel": "rlhf_core.detached.coati.factories",
    "get_rank": "rlhf_core.detached.coati.factories",
    "get_receivers_per_sender": "rlhf_core.detached.coati.receivers",
    "get_reward_model_from_args": "rlhf_core.detached.coati.factories",
    "get_strategy_from_args": "rlhf_core.detached.coati.factories",
    "get_tokenizer_from_args": "rlhf_core.detached.coati.factories",
    "get_world_size": "rlhf_core.detached.coati.factories",
    "gsm8k_reward_fn": "rlhf_core.rewards.functions",
    "is_rank_0": "rlhf_core.detached.coati.factories",
    "make_strategy": "rlhf_core.strategy.strategy",
    "math_competition_reward_fn": "rlhf_core.rewards.functions",
    "set_dist_env": "rlhf_core.detached.coati.factories",
    "setup_conversation_template": "rlhf_core.data.conversation",
    "state_dict_to": "rlhf_core.detached.coati.lora",
    "train_reward_model": "rlhf_core.trainer.supervised.reward_model",
    "train_sft": "rlhf_core.trainer.supervised.sft",
    "validate_response_structure": "rlhf_core.rewards.structure",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

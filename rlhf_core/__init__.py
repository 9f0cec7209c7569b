"""The learning; imports no orchestrator.

The public names below are loaded when they are first used: importing this package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_core.coati.buffer import NaiveExperienceBuffer
    from rlhf_core.coati.callbacks import (
        Callback,
        ExperienceMakerPerformanceEvaluator,
        MakerCallback,
        PerformanceEvaluator,
        TrainerCallback,
        TrainerPerformanceEvaluator,
    )
    from rlhf_core.coati.detached.building import LearningOptions
    from rlhf_core.coati.detached.factories import (
        get_actor_from_args,
        get_critic_from_args,
        get_model_numel,
        get_rank,
        get_receivers_per_sender,
        get_reward_model_from_args,
        get_strategy_from_args,
        get_tokenizer_from_args,
        get_world_size,
        is_rank_0,
        set_dist_env,
    )
    from rlhf_core.coati.detached.holder import ExperienceMakerHolder
    from rlhf_core.coati.detached.lora import LoRAConstructor, state_dict_to
    from rlhf_core.coati.detached.ppo_trainer import DetachedPPOTrainer
    from rlhf_core.coati.detached.replay_buffer import DetachedReplayBuffer
    from rlhf_core.coati.detached.scheduled_fit import DealingOptions
    from rlhf_core.coati.detached.trainer import DetachedTrainer
    from rlhf_core.coati.experience_maker import NaiveExperienceMaker
    from rlhf_core.coati.loss import GPTLMLoss, LogExpLoss, LogSigLoss, PolicyLoss, ValueLoss
    from rlhf_core.coati.ol_trainer import OLTrainer
    from rlhf_core.coati.ppo_trainer import PPOTrainer
    from rlhf_core.coati.strategy import Strategy, make_strategy
    from rlhf_core.config import PPOOptions
    from rlhf_core.data.conversation import Conversation, encode_conversation, setup_conversation_template
    from rlhf_core.data.loaders import (
        DataCollatorForPromptDataset,
        DataCollatorForSupervisedDataset,
        StatefulDistributedSampler,
    )
    from rlhf_core.models.critic import Critic
    from rlhf_core.models.reward_model import RewardModel
    from rlhf_core.ppo.learner import PPOLearner
    from rlhf_core.ppo.metrics import PPOStats
    from rlhf_core.rewards.functions import gsm8k_reward_fn, math_competition_reward_fn
    from rlhf_core.rewards.model import RLVRRewardModel
    from rlhf_core.rewards.structure import validate_response_structure
    from rlhf_core.rollout.experience import ExperienceMaker
    from rlhf_core.strategy.booster import Booster
    from rlhf_core.strategy.plain import PlainBooster
    from rlhf_core.supervised.batches import DataCollatorForPreferenceDataset
    from rlhf_core.supervised.reward_model import RewardModelTrainer, train_reward_model
    from rlhf_core.supervised.sft import SFTTrainer, train_sft
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
    "Callback": "rlhf_core.coati.callbacks",
    "Conversation": "rlhf_core.data.conversation",
    "Critic": "rlhf_core.models.critic",
    "DataCollatorForPreferenceDataset": "rlhf_core.supervised.batches",
    "DataCollatorForPromptDataset": "rlhf_core.data.loaders",
    "DataCollatorForSupervisedDataset": "rlhf_core.data.loaders",
    "DealingOptions": "rlhf_core.coati.detached.scheduled_fit",
    "DetachedPPOTrainer": "rlhf_core.coati.detached.ppo_trainer",
    "DetachedReplayBuffer": "rlhf_core.coati.detached.replay_buffer",
    "DetachedTrainer": "rlhf_core.coati.detached.trainer",
    "Experience": "rlhf_core.types",
    "ExperienceMaker": "rlhf_core.rollout.experience",
    "ExperienceMakerHolder": "rlhf_core.coati.detached.holder",
    "ExperienceMakerPerformanceEvaluator": "rlhf_core.coati.callbacks",
    "GPTLMLoss": "rlhf_core.coati.loss",
    "LearningOptions": "rlhf_core.coati.detached.building",
    "LoRAConstructor": "rlhf_core.coati.detached.lora",
    "LogExpLoss": "rlhf_core.coati.loss",
    "LogSigLoss": "rlhf_core.coati.loss",
    "MakerCallback": "rlhf_core.coati.callbacks",
    "NaiveExperienceBuffer": "rlhf_core.coati.buffer",
    "NaiveExperienceMaker": "rlhf_core.coati.experience_maker",
    "OLTrainer": "rlhf_core.coati.ol_trainer",
    "PPOLearner": "rlhf_core.ppo.learner",
    "PPOOptions": "rlhf_core.config",
    "PPOStats": "rlhf_core.ppo.metrics",
    "PPOTrainer": "rlhf_core.coati.ppo_trainer",
    "PerformanceEvaluator": "rlhf_core.coati.callbacks",
    "PlainBooster": "rlhf_core.strategy.plain",
    "PolicyLoss": "rlhf_core.coati.loss",
    "RLVRRewardModel": "rlhf_core.rewards.model",
    "RewardModel": "rlhf_core.models.reward_model",
    "RewardModelTrainer": "rlhf_core.supervised.reward_model",
    "SFTTrainer": "rlhf_core.supervised.sft",
    "Sample": "rlhf_core.types",
    "StatefulDistributedSampler": "rlhf_core.data.loaders",
    "Strategy": "rlhf_core.coati.strategy",
    "TrainerCallback": "rlhf_core.coati.callbacks",
    "TrainerPerformanceEvaluator": "rlhf_core.coati.callbacks",
    "ValueLoss": "rlhf_core.coati.loss",
    "encode_conversation": "rlhf_core.data.conversation",
    "get_actor_from_args": "rlhf_core.coati.detached.factories",
    "get_critic_from_args": "rlhf_core.coati.detached.factories",
    "get_model_numel": "rlhf_core.coati.detached.factories",
    "get_rank": "rlhf_core.coati.detached.factories",
    "get_receivers_per_sender": "rlhf_core.coati.detached.factories",
    "get_reward_model_from_args": "rlhf_core.coati.detached.factories",
    "get_strategy_from_args": "rlhf_core.coati.detached.factories",
    "get_tokenizer_from_args": "rlhf_core.coati.detached.factories",
    "get_world_size": "rlhf_core.coati.detached.factories",
    "gsm8k_reward_fn": "rlhf_core.rewards.functions",
    "is_rank_0": "rlhf_core.coati.detached.factories",
    "make_strategy": "rlhf_core.coati.strategy",
    "math_competition_reward_fn": "rlhf_core.rewards.functions",
    "set_dist_env": "rlhf_core.coati.detached.factories",
    "setup_conversation_template": "rlhf_core.data.conversation",
    "state_dict_to": "rlhf_core.coati.detached.lora",
    "train_reward_model": "rlhf_core.supervised.reward_model",
    "train_sft": "rlhf_core.supervised.sft",
    "validate_response_structure": "rlhf_core.rewards.structure",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

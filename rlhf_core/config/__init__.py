"""Every setting of a run, as frozen pydantic models. Imports no torch: flows and the command line read it."""

from rlhf_core.config.base import Config
from rlhf_core.config.budget import BudgetConfig
from rlhf_core.config.conditions import ConditionsConfig, ForgettingConfig
from rlhf_core.config.data import ArrivalsConfig, DataConfig, SourceConfig, SplitsConfig, TemplateConfig
from rlhf_core.config.model import LoRAConfig, ModelConfig
from rlhf_core.config.pipeline import EvaluationConfig, GateConfig, PipelineConfig
from rlhf_core.config.ppo import (
    ClusterConfig,
    LearningConfig,
    PPOConfig,
    PPOOptions,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    StopConfig,
)
from rlhf_core.config.strategy import StrategyName, TrainersConfig
from rlhf_core.config.supervised import RewardModelConfig, SFTConfig

__all__ = [
    "ArrivalsConfig",
    "BudgetConfig",
    "ClusterConfig",
    "ConditionsConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "ForgettingConfig",
    "GateConfig",
    "LearningConfig",
    "LoRAConfig",
    "ModelConfig",
    "PPOConfig",
    "PPOOptions",
    "PipelineConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "SFTConfig",
    "SamplingConfig",
    "SourceConfig",
    "SplitsConfig",
    "StopConfig",
    "StrategyName",
    "TemplateConfig",
    "TrainersConfig",
]

"""A reward function that cannot be is refused before anything starts."""

from __future__ import annotations

import pytest

from rlhf_core.config import DataConfig, PipelineConfig, PPOConfig, RewardConfig
from rlhf_core.errors import ConfigError
from tasks.preflight import check_reward_functions


def config(function: str, task: str = "number_sorting") -> PipelineConfig:
    ppo = PPOConfig(reward=RewardConfig(functions={function: 1.0}))
    return PipelineConfig(name="chain", data=DataConfig(task=task), ppo=ppo)


def test_names_tasks_and_allowed_paths_pass() -> None:
    check_reward_functions(config("gsm8k_reward_fn"), ())
    check_reward_functions(config("reasoning_gym:countdown", task="countdown"), ())
    check_reward_functions(config("mine.rewards:brevity"), ("mine",))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("gsm8k_reward", "did you mean gsm8k_reward_fn"),
        ("mine.rewards:brevity", "RLHF_REWARD_MODULES"),
        ("reasoning_gym:countdown", "scores by the records of task 'countdown', but data.task is 'number_sorting'"),
    ],
)
def test_others_are_refused_in_a_sentence(function: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_reward_functions(config(function), ())

"""Choices of PPO that exclude each other are told before anything is fetched or started."""

from __future__ import annotations

import pytest

from rlhf_core.config import PipelineConfig, PPOConfig
from rlhf_core.errors import ConfigError
from tasks.parents import wants_reward_model
from tasks.preflight import check_ppo


def preset(**changes: object) -> PipelineConfig:
    return PipelineConfig(name="test", ppo=PPOConfig(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"critic_init": "reward_model", "advantage_estimator": "rloo", "samples_per_prompt": 2}, "rloo has no critic"),
        ({"critic_init": "reward_model", "legacy": True}, "legacy judges by rules of its own"),
    ],
)
def test_choices_that_exclude_each_other_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_ppo(preset(**changes))


def test_choices_that_go_together_pass() -> None:
    check_ppo(preset())
    check_ppo(preset(critic_init="reward_model"))


def test_a_critic_that_starts_as_the_reward_model_needs_one_even_where_it_does_not_score() -> None:
    assert not wants_reward_model(preset())
    assert wants_reward_model(preset(critic_init="reward_model"))
    assert wants_reward_model(preset(reward={"reward_model": 0.5}))

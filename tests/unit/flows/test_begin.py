"""Which stages a run trains: their strategies are looked at, and no others."""

from __future__ import annotations

import pytest

from flows.begin import _training
from rlhf_core.config import PipelineConfig
from tasks.data import SPLITS


def config(weight: float) -> PipelineConfig:
    reward = {"verifier": 1.0, "reward_model": weight}
    return PipelineConfig.model_validate({"name": "test", "data": {"task": "gcd"}, "ppo": {"reward": reward}})


@pytest.mark.parametrize(
    ("trains", "reads", "weight", "given", "stages"),
    [
        ("sft", ("sft",), 0.0, {}, ("sft",)),
        ("reward-model", (), 0.0, {}, ("reward_model",)),
        (None, ("evaluation",), 0.0, {}, ()),
        ("ppo", ("ppo",), 1.0, {}, ("ppo",)),  # the flow of PPO alone takes the models that there are
        ("ppo", SPLITS, 1.0, {}, ("sft", "reward_model", "ppo")),
        ("ppo", SPLITS, 0.0, {}, ("sft", "ppo")),  # nobody asks a reward model
        ("ppo", SPLITS, 1.0, {"actor": "sft/a@1"}, ("reward_model", "ppo")),
        ("ppo", SPLITS, 1.0, {"actor": "sft/a@1", "reward_model": "reward-model/a@1"}, ("ppo",)),
    ],
)
def test_a_stage_trains_where_its_model_is_not_there_already(
    trains: str | None, reads: tuple[str, ...], weight: float, given: dict[str, str], stages: tuple[str, ...]
) -> None:
    named = {"actor": given.get("actor"), "reward_model": given.get("reward_model")}
    assert _training(config(weight), trains, reads, **named) == stages

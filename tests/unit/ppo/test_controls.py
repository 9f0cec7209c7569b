"""The KL coefficient and the scale of scores, by hand."""

from __future__ import annotations

import json
from statistics import pstdev

import pytest
import torch
from pydantic import ValidationError

from rlhf_core.config import RolloutConfig
from rlhf_core.errors import ModelError, TrainingError
from rlhf_core.ppo.controls import RewardControls
from rlhf_core.strategy.ranks import ALONE


def update(controls: RewardControls, kl: list[float], scores: list[float]) -> None:
    controls.update(kl_per_sample=torch.tensor(kl), scores=torch.tensor(scores))


def test_by_default_nothing_is_steered() -> None:
    controls = RewardControls(RolloutConfig(kl_coef=0.05), ALONE)
    update(controls, [9.0, 11.0], [0.0, 10.0])
    assert controls.current() == (0.05, 0.0, 1.0)


def test_the_coefficient_follows_the_divergence() -> None:
    controls = RewardControls(RolloutConfig(kl_coef=0.1, kl_target=5.0, kl_horizon=100), ALONE)
    update(controls, [5.0, 6.0], [0.0, 0.0])  # error 0.1, two samples: 1 + 0.1 * 2 / 100
    assert controls.current().kl_coef == pytest.approx(0.1 * 1.002)
    update(controls, [0.0, 0.0], [0.0, 0.0])  # error -1, cut to -0.2
    assert controls.current().kl_coef == pytest.approx(0.1 * 1.002 * 0.996)


def test_scores_are_divided_by_the_deviation_of_all_earlier_episodes() -> None:
    controls = RewardControls(RolloutConfig(normalise_rewards=True), ALONE)
    assert controls.current().score_std == 1.0
    update(controls, [0.0, 0.0], [3.0, 7.0])
    assert controls.current()[1:] == (0.0, pytest.approx(2.0))
    update(controls, [0.0, 0.0, 0.0], [100.0, 0.0, 1.0])
    assert controls.current().score_std == pytest.approx(pstdev([3.0, 7.0, 100.0, 0.0, 1.0]))


def test_who_shares_an_episode_is_always_told() -> None:
    """A default would be right or wrong by what was called before: ranks may meet at any time."""
    with pytest.raises(TypeError, match="ranks"):
        RewardControls(RolloutConfig())  # type: ignore[call-arg]


def test_a_state_through_json_goes_on_to_the_same_bits() -> None:
    config = RolloutConfig(kl_coef=0.1, kl_target=0.7, kl_horizon=13, normalise_rewards=True)
    straight, resumed = RewardControls(config, ALONE), RewardControls(config, ALONE)
    update(straight, [0.1, 1.3], [0.3, 1.7])
    resumed.load_state(json.loads(json.dumps(straight.state())))
    assert resumed.current() == straight.current()
    for controls in (straight, resumed):
        update(controls, [0.9, 0.2], [0.1, 2.3])
    assert resumed.current() == straight.current()


def test_a_number_that_is_none_is_refused_and_changes_nothing() -> None:
    controls = RewardControls(RolloutConfig(normalise_rewards=True, kl_target=1.0), ALONE)
    for kl, scores in (([float("nan")], [0.0]), ([0.0], [float("inf")])):
        with pytest.raises(TrainingError, match="not finite"):
            update(controls, kl, scores)
    assert controls.state() == RewardControls(RolloutConfig(), ALONE).state()


def test_a_damaged_state_is_refused() -> None:
    with pytest.raises(ModelError, match="state of the reward's controls is damaged"):
        RewardControls(RolloutConfig(), ALONE).load_state({"kl_coef": 0.1})


def test_a_stored_coefficient_of_zero_is_steered_from_the_smallest_where_there_is_a_target_now() -> None:
    stored = RewardControls(RolloutConfig(kl_coef=0.0), ALONE).state()
    plain, steered = (
        RewardControls(RolloutConfig(), ALONE),
        RewardControls(RolloutConfig(kl_target=5.0, kl_horizon=2), ALONE),
    )
    for controls in (plain, steered):
        controls.load_state(stored)
        update(controls, [50.0, 50.0], [0.0, 0.0])
    assert plain.current().kl_coef == 0.0
    assert steered.current().kl_coef == pytest.approx(1.2e-6)
    with pytest.raises(ModelError, match="is damaged"):
        steered.load_state(stored | {"kl_coef": float("nan")})


def test_a_coefficient_of_zero_cannot_be_steered() -> None:
    with pytest.raises(ValidationError, match=r"ppo.kl_target steers ppo.kl_coef, which from 0 goes nowhere"):
        RolloutConfig(kl_coef=0.0, kl_target=5.0)

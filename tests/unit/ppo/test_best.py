"""Which episode is kept, and when a run ends before its last one."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config import PipelineConfig, PPOConfig
from rlhf_core.ppo.best import best_episode, is_measured, why_it_stops


def config(**facts: Any) -> PPOConfig:
    weights = {"verifier": 0.0, "reward_model": 1.0}
    return PPOConfig.model_validate({"episodes": 10, "evaluate_every": 1, "reward": weights, **facts})


def rows(development: list[float | None], proxy: list[float] | None = None) -> list[dict[str, float]]:
    found: list[dict[str, float]] = []
    for at, figure in enumerate(development):
        measured = {} if figure is None else {"development": figure}
        found.append({"kl": 0.1 * at, "raw/reward_model": proxy[at] if proxy else 0.0, **measured})
    return found


def test_every_few_episodes_are_measured_and_the_last() -> None:
    assert [each for each in range(10) if is_measured(each, config(evaluate_every=4))] == [3, 7, 9]
    assert not any(is_measured(each, config(evaluate_every=0)) for each in range(10))


def test_the_first_of_the_best_is_kept() -> None:
    assert best_episode(rows([None, 0.25, None, 0.5, 0.5, 0.0])) == 3
    assert best_episode(rows([None, None])) is None


def test_kl_above_the_limit_for_several_episodes_in_a_row_ends_it() -> None:
    asked = config(stop={"kl": 0.25, "episodes": 2})
    history = rows([0.5] * 6)  # KL is 0, 0.1, 0.2, 0.3, 0.4
    assert [why_it_stops(history[:count], asked) is None for count in range(7)] == [True] * 5 + [False] * 2
    assert why_it_stops(history[:5], asked) == ("KL was 0.300, 0.400 nats in the last episodes, above ppo.stop.kl 0.25")


@pytest.mark.parametrize(
    ("development", "proxy", "stops"),
    [
        ([0.5, 0.6, 0.4, 0.3], [1.0, 2.0, 3.0, 4.0], True),
        ([0.5, 0.6, 0.4, 0.5], [1.0, 2.0, 3.0, 4.0], False),  # once only
        ([0.5, 0.6, 0.4, 0.3], [1.0, 2.0, 1.5, 4.0], False),  # the reward model paid less than at the best
        ([0.5, 0.6, None, 0.3], [1.0, 2.0, 3.0, 4.0], False),  # measured once
        ([0.3, 0.4, 0.5, 0.6], [1.0, 2.0, 3.0, 4.0], False),
    ],
)
def test_a_reward_model_that_pays_more_for_less_ends_it(
    development: list[float | None], proxy: list[float], stops: bool
) -> None:
    why = why_it_stops(rows(development, proxy), config(stop={"drift": 0.1, "episodes": 2}))
    assert (why is not None) is stops
    if why is not None:
        assert why == (
            "since episode 2 the development figure fell from 0.600 to 0.300 while the reward model's score rose from "
            "2.000 to 4.000 (ppo.stop.drift 0.1)"
        )


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"ppo.evaluate_every is 2, but data.splits.development is 0; give it"):
        PipelineConfig.model_validate({"name": "p", "data": {"task": "chain_sum"}, "ppo": {"evaluate_every": 2}})
    with pytest.raises(ValidationError, match=r"set ppo.evaluate_every, and ppo.reward.reward_model above 0"):
        PPOConfig.model_validate({"stop": {"drift": 0.1}})

"""A critic that starts as a reward model: the line is the least-squares one, and is folded in where values are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlhf_core.coati.callbacks import Callback
from rlhf_core.coati.ppo_trainer import PPOTrainer
from rlhf_core.errors import ConfigError, TrainingError
from rlhf_core.models.critic import Critic
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.ppo.critic_start import ValueLine, fit_line, rescale_head
from rlhf_core.ppo.learner import PPOLearner, PPOStats
from rlhf_core.strategy.plain import PlainBooster
from rlhf_core.strategy.ranks import ALONE
from rlhf_core.training.optim import make_trained, warmup_then_constant
from rlhf_core.training.padding import PaddedBatch
from rlhf_core.types import Experience
from tests.reference import definitions
from tests.tiny_llama import tiny_llama
from tests.unit.coati.ppo_trainers import OPTIONS, prompts, record_stats, restless_llama, trainer
from tests.unit.ppo.experience import RESPONSES, tiny_experience
from tests.unit.ppo.test_learner import CONFIG

CONFIGURED = CONFIG.model_copy(update={"critic_init": "reward_model", "gamma": 0.9, "lam": 0.7, "max_ratio": None})


def rows_of(table: torch.Tensor) -> list[list[float]]:
    return [row[: len(response)].tolist() for row, response in zip(table, RESPONSES, strict=True)]


def returns(experience: Experience, gamma: float) -> list[float]:
    found = []
    for rewards in rows_of(experience.reward):
        found += [sum(gamma**ahead * reward for ahead, reward in enumerate(rewards[t:])) for t in range(len(rewards))]
    return found


def judged(critic: Critic, experience: Experience) -> Experience:
    """The experience as a maker with this critic would have made it."""
    with torch.no_grad():
        values = critic.response_values(
            sequences=experience.sequences, attention_mask=experience.attention_mask, num_actions=experience.num_actions
        )
    advantages = torch.zeros_like(values)
    for row, (rewards, said) in enumerate(zip(rows_of(experience.reward), rows_of(values), strict=True)):
        advantages[row, : len(rewards)] = torch.tensor(definitions.gae(rewards, said, CONFIGURED.gamma, CONFIGURED.lam))
    values = torch.where(experience.action_mask, values, 0.0)
    return experience.replace(values=values, advantages=advantages, returns=advantages + values)


def reward_model() -> RewardModel:
    model = RewardModel.from_causal_lm(tiny_llama(initializer_range=0.2))
    nn.init.normal_(model.head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    nn.init.constant_(model.head.bias, 3.0)
    return model


def build() -> tuple[PPOLearner, Critic]:
    critic = Critic.from_reward_model(reward_model(), keep_head=True)
    return PPOLearner.build(tiny_llama(initializer_range=0.2), critic, CONFIGURED, device="cpu"), critic


def test_the_head_of_the_reward_model_is_kept_apart_from_it() -> None:
    model = reward_model()
    critic = Critic.from_reward_model(model, keep_head=True)
    assert torch.equal(critic.head.weight, model.head.weight)
    assert critic.head.weight is not model.head.weight
    assert not Critic.from_reward_model(model).head.weight.any()


def test_the_line_is_that_of_least_squares() -> None:
    experience = tiny_experience(rubbish=float("nan"))
    line = fit_line(experience, gamma=0.9, ranks=ALONE)
    values = [value for row in rows_of(experience.values) for value in row]
    slope, intercept = np.polyfit(values, returns(experience, 0.9), deg=1)
    assert (line.slope, line.intercept) == pytest.approx((slope, intercept), rel=1e-4)


def test_equal_values_have_no_slope_and_the_mean_return_is_left() -> None:
    experience = tiny_experience()
    experience = experience.replace(values=torch.full_like(experience.values, 2.0))
    line = fit_line(experience, gamma=1.0, ranks=ALONE)
    assert (line.slope, line.intercept) == (0.0, pytest.approx(np.mean(returns(experience, 1.0)), rel=1e-4))


@pytest.mark.parametrize("value", [100.0, 1000.0])
@pytest.mark.parametrize("roundings", [1, 2])
def test_values_that_differ_by_roundings_have_no_slope(value: float, roundings: int) -> None:
    experience = tiny_experience()
    step = roundings * float(np.spacing(np.float32(value)))
    values = value + step * torch.randint(-1, 2, experience.values.shape, generator=torch.Generator().manual_seed(0))
    line = fit_line(experience.replace(values=values), gamma=1.0, ranks=ALONE)
    assert (line.slope, line.intercept) == (0.0, pytest.approx(np.mean(returns(experience, 1.0)), rel=1e-4))


def test_the_first_episode_is_restated_as_the_rescaled_critic_would_have_judged_it() -> None:
    ours, critic = build()
    before = judged(critic, tiny_experience())
    restated = ours.recompute(before)
    expected = judged(critic, tiny_experience())  # the head was rescaled: a second forward pass agrees
    mask = before.action_mask
    for name in ("values", "advantages", "returns"):
        found, wanted = getattr(restated, name)[mask], getattr(expected, name)[mask]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(found, getattr(before, name)[mask])
    errors = np.array(returns(before, 0.9)) - np.array([v for row in rows_of(restated.values) for v in row])
    assert errors.mean() == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("version", [0, 1])
def test_what_the_rescaled_critic_judged_is_never_restated_not_even_of_the_same_version(version: int) -> None:
    ours, critic = build()
    ours.recompute(judged(critic, tiny_experience()))
    weight = critic.head.weight.clone()
    again = judged(critic, tiny_experience(1)).replace(policy_version=torch.full((8,), version))
    found = ours.recompute(again)
    assert torch.equal(critic.head.weight, weight)
    for name in ("values", "advantages", "returns"):
        assert torch.equal(getattr(found, name), getattr(again, name)), name


def test_what_was_restated_once_can_be_recomputed_again() -> None:
    ours, critic = build()
    first = ours.recompute(judged(critic, tiny_experience()))
    second = ours.recompute(first)
    assert all(torch.equal(tensor, second.tensors()[name]) for name, tensor in first.tensors().items())


def test_a_resumed_run_does_not_fit_again() -> None:
    ours, critic = build()
    ours.recompute(judged(critic, tiny_experience()))
    resumed, other = build()
    resumed.load_state(*ours.state())
    weight = other.head.weight.clone()
    assert torch.equal(weight, critic.head.weight)
    resumed.recompute(tiny_experience(seed=1))
    assert torch.equal(other.head.weight, weight)


def test_a_critic_without_a_linear_head_is_refused() -> None:
    critic = make_trained(nn.Sequential(nn.Linear(1, 1)), lr=1.0, weight_decay=0.0, schedule=warmup_then_constant(0))
    with pytest.raises(ConfigError, match="rescales the critic's linear head, but Sequential trains none"):
        rescale_head(critic, ValueLine(1.0, 0.0))


def test_legacy_numbers_and_a_fitted_critic_exclude_each_other() -> None:
    config = CONFIGURED.model_copy(update={"legacy": True})
    with pytest.raises(ConfigError, match=r"set ppo.critic_init to policy"):
        PPOLearner.build(tiny_llama(), Critic.from_causal_lm(tiny_llama()), config, device="cpu")


FITTED = OPTIONS.model_copy(update={"critic_init": "reward_model"})


class Seen(Callback):
    """What was collected, and what was learnt from."""

    def __init__(self, ours: PPOTrainer, *, failing: int = -1) -> None:
        self.collected: list[Experience] = []
        self.learnt: list[Experience] = []
        step = ours.learner.training_step

        def spy(experience: Experience, ptx: PaddedBatch | None = None) -> PPOStats:
            self.learnt.append(experience)
            if len(self.learnt) - 1 == failing:
                raise TrainingError("something is not finite")
            return step(experience, ptx)

        ours.learner.training_step = spy  # type: ignore[method-assign]
        ours.callbacks = (self,)

    def on_make_experience_end(self, experience: Experience) -> None:
        self.collected.append(experience)


def fitted_trainer(**changes: Any) -> PPOTrainer:
    ours = trainer(options=FITTED, **changes)
    nn.init.normal_(ours.learner.critic.head.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    return ours


def values_by_row(experience: Experience) -> dict[tuple[int, ...], list[float]]:
    """What the critic said of each row; training batches come in an order of their own."""
    rows = zip(experience.sequences.tolist(), experience.values.tolist(), strict=True)
    return {tuple(sequence): values for sequence, values in rows}


def test_a_fit_after_one_that_failed_learns_what_was_collected_and_restates_it_once() -> None:
    ours = fitted_trainer()
    seen = Seen(ours, failing=0)
    with pytest.raises(TrainingError, match="something is not finite"):
        ours.fit(1, 1, 1, prompts())
    ours.fit(1, 1, 1, prompts())
    failed, second = map(values_by_row, seen.learnt)
    assert failed.keys() == values_by_row(seen.collected[0]).keys()
    assert failed != values_by_row(seen.collected[0])  # restated
    assert second == failed
    ours.fit(2, 1, 1, prompts())
    assert values_by_row(seen.learnt[-1]) == values_by_row(seen.collected[-1])  # judged by the rescaled critic


def test_a_checkpoint_that_is_loaded_after_a_failed_fit_finds_nothing_of_it(tmp_path: Path) -> None:
    fitted_trainer(save_dir=tmp_path).fit(1, 1, 1, prompts())
    ours = fitted_trainer()
    seen = Seen(ours, failing=1)
    with pytest.raises(TrainingError, match="something is not finite"):
        ours.fit(1, 1, 2, prompts())  # the first of two steps was taken
    ours.load_checkpoint(tmp_path)
    ours.fit(2, 1, 1, prompts())
    assert values_by_row(seen.learnt[-1]) == values_by_row(seen.collected[-1])


def test_passes_that_move_the_trust_region_keep_what_was_restated() -> None:
    ours = trainer(options=FITTED.model_copy(update={"correction": "decoupled"}))
    nn.init.normal_(ours.learner.critic.head.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    seen = Seen(ours)
    ours.fit(1, 1, 2, prompts())
    first, second = map(values_by_row, seen.learnt)
    assert first == second != values_by_row(seen.collected[0])


def test_coatis_trainer_takes_a_critic_that_its_estimator_needs_not_and_leaves_it_alone() -> None:
    options = OPTIONS.model_copy(update={"advantage_estimator": "rloo", "samples_per_prompt": 2})
    actor = restless_llama()
    both = make_trained(
        Critic.from_causal_lm(actor), lr=1e-3, weight_decay=0.0, schedule=lambda _: 1.0, booster=PlainBooster()
    )
    before = [parameter.clone() for parameter in both.model.parameters()]
    ours = trainer(
        critic=both.model, critic_optim=both.optimizer, critic_lr_scheduler=both.scheduler, options=options,
    )  # fmt: skip
    stats = record_stats(ours)
    ours.fit(1, 1, 1, prompts())
    assert {(step.critic_loss, step.critic_grad_norm, step.critic_lr) for step in stats} == {(0.0, 0.0, 0.0)}
    assert all(torch.equal(new, old) for new, old in zip(both.model.parameters(), before, strict=True))

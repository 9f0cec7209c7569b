"""Advantages without a critic: by hand, by definition, and what must not change them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlhf_core.functional.advantages import (
    dr_grpo_advantages,
    grpo_advantages,
    reinforce_pp_advantages,
    rloo_advantages,
    token_rewards,
)
from tests.reference import definitions
from tests.unit.functional.ragged import assert_close, mask, pad, random_rows, unpad

Estimator = Callable[..., Tensor]


def grpo(*, scores: Tensor, group_size: int) -> Tensor:
    """GRPO without penalties."""
    return grpo_advantages(scores=scores, penalties=torch.zeros_like(scores), group_size=group_size)


ESTIMATORS = (grpo, dr_grpo_advantages, rloo_advantages)
GROUPS = [[0.3, -1.0, 2.0], [5.0, 4.0, 4.5]]
SCORES = torch.tensor(GROUPS).flatten()


def test_group_advantages_by_hand() -> None:
    # 1, 2, 6: mean 3; sample deviation sqrt((4 + 1 + 9) / 2) = sqrt 7
    scores = torch.tensor([1.0, 2.0, 6.0])
    assert_close(dr_grpo_advantages(scores=scores, group_size=3), torch.tensor([-2.0, -1.0, 3.0]))
    assert_close(grpo(scores=scores, group_size=3), torch.tensor([-2.0, -1.0, 3.0]) / 7**0.5)
    # against the others' means: 1 - 4, 2 - 3.5, 6 - 1.5
    assert_close(rloo_advantages(scores=scores, group_size=3), torch.tensor([-3.0, -1.5, 4.5]))


def test_group_advantages_agree_with_their_definitions() -> None:
    found = {estimator: estimator(scores=SCORES, group_size=3).view(2, 3) for estimator in ESTIMATORS}
    for row, scores in enumerate(GROUPS):
        plain = definitions.group_advantages(scores)
        assert_close(found[dr_grpo_advantages][row], torch.tensor(plain))
        others = definitions.group_advantages(scores, leave_one_out=True)
        assert_close(found[rloo_advantages][row], torch.tensor(others))
        scaled = definitions.group_advantages(scores, scaled=True)
        assert_close(found[grpo][row], torch.tensor(scaled))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_groups_do_not_see_each_other(estimator: Estimator) -> None:
    together = estimator(scores=SCORES, group_size=3)
    apart = torch.cat([estimator(scores=torch.tensor(scores), group_size=3) for scores in GROUPS])
    assert torch.equal(together, apart)
    turned = estimator(scores=SCORES.view(2, 3).flip(0).flatten(), group_size=3)
    assert torch.equal(turned, together.view(2, 3).flip(0).flatten())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_order_within_a_group_does_not_matter(estimator: Estimator) -> None:
    order = [2, 0, 1]
    turned = estimator(scores=SCORES[:3][order], group_size=3)
    assert_close(turned, estimator(scores=SCORES[:3], group_size=3)[order])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_bonus_for_all_changes_nothing_and_advantages_cancel(estimator: Estimator) -> None:
    found = estimator(scores=SCORES, group_size=3)
    assert_close(estimator(scores=SCORES + 7, group_size=3), found)
    assert_close(found.view(2, 3).sum(dim=1), torch.zeros(2))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("score", [0.0, 0.1, -3.3])
def test_equal_scores_teach_exactly_nothing(estimator: Estimator, score: float) -> None:
    assert torch.equal(estimator(scores=torch.full((7,), score), group_size=7), torch.zeros(7))


def test_scores_of_a_group_that_differ_by_rounding_alone_teach_grpo_nothing() -> None:
    scores = torch.tensor([1000.1, 1000.1, 1000.1, 2.0, 3.0, 4.0])
    scores[1] = torch.nextafter(scores[1], torch.tensor(1e9))  # would be 1.15 and twice -0.58
    assert grpo(scores=scores, group_size=3).tolist() == pytest.approx([0.0, 0.0, 0.0, -1.0, 0.0, 1.0], abs=1e-5)


def test_a_score_that_is_no_number_stays_one_in_its_group() -> None:
    scores, none = torch.tensor([torch.nan, 1.0, torch.inf, 1.0, 2.0, 3.0]), torch.zeros(6)
    found = grpo_advantages(scores=scores, penalties=none, group_size=2)
    assert found[:4].isnan().all()
    assert found[4:].isfinite().all()


def test_grpo_subtracts_what_a_response_pays_beyond_its_groups_mean() -> None:
    # scores 1, 2, 6 as above; penalties 0.1, 0.4, 0.1: mean 0.2
    found = grpo_advantages(scores=torch.tensor([1.0, 2.0, 6.0]), penalties=torch.tensor([0.1, 0.4, 0.1]), group_size=3)
    assert_close(found, torch.tensor([-2.0, -1.0, 3.0]) / 7**0.5 - torch.tensor([-0.1, 0.2, -0.1]))


@pytest.mark.parametrize("kl_coef", [0.0, 0.01, 0.1])
def test_where_all_scores_are_equal_grpo_leaves_a_penalty_that_its_weight_scales(kl_coef: float) -> None:
    divergence = torch.tensor([0.1, -0.2, 0.0, 0.3])  # mean 0.05
    found = grpo_advantages(scores=torch.full((4,), 0.7), penalties=kl_coef * divergence, group_size=4)
    assert_close(found, -kl_coef * torch.tensor([0.05, -0.25, -0.05, 0.25]))


def test_only_grpo_forgets_the_scale() -> None:
    assert_close(grpo(scores=10 * SCORES, group_size=3), grpo(scores=SCORES, group_size=3))
    for estimator in (dr_grpo_advantages, rloo_advantages):
        assert_close(estimator(scores=10 * SCORES, group_size=3), 10 * estimator(scores=SCORES, group_size=3))


def test_leaving_one_out_leaves_the_gradient_unbiased() -> None:
    # One token, three words, 2 samples of each prompt: the mean over all pairs of draws of sum_i A_i grad log pi(x_i)
    # is 2 grad E[s], where grad E[s] = p_k (s_k - E[s]) for logit k. With the plain mean it is half of that.
    p, s = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([1.0, 4.0, -2.0])
    exact = p * (s - (p * s).sum())
    for estimator, factor in ((rloo_advantages, 2.0), (dr_grpo_advantages, 1.0)):
        total = torch.zeros(3)
        for i in range(3):
            for j in range(3):
                advantages = estimator(scores=s[[i, j]], group_size=2)
                score_functions = torch.eye(3)[[i, j]] - p
                total += p[i] * p[j] * (advantages[:, None] * score_functions).sum(dim=0)
        assert_close(total, factor * exact)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(("scores", "group_size"), [(6, 1), (6, 4), (6, 0)])
def test_groups_that_are_not_whole_are_refused(estimator: Estimator, scores: int, group_size: int) -> None:
    with pytest.raises(ValueError, match=f"got {scores} scores and group_size {group_size}"):
        estimator(scores=torch.zeros(scores), group_size=group_size)


def test_reward_to_go_by_hand() -> None:
    # gamma 1/2: 4; 2 + 2 = 4; 1 + 2 = 3
    rewards = torch.tensor([[1.0, 2.0, 4.0]])
    found = reinforce_pp_advantages(rewards=rewards, mask=rewards > 0, gamma=0.5)
    assert_close(found, torch.tensor([[3.0, 4.0, 4.0]]))


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_reward_to_go_agrees_with_its_definition_whatever_lies_in_the_padding(gamma: float) -> None:
    rows = random_rows(1)
    found = reinforce_pp_advantages(rewards=pad(rows), mask=mask(), gamma=gamma)
    for row, rewards in zip(unpad(found), rows, strict=True):
        assert_close(torch.tensor(row), torch.tensor(definitions.reward_to_go(rewards, gamma)))
    assert torch.equal(found[~mask()], torch.zeros(9))


def test_the_rewards_of_a_row_add_up_to_the_score_that_groups_compare() -> None:
    # score - kl_coef * sum of KL: 1 - 0.5 * (1 + 2) and -1 - 0.5 * 4
    kl = torch.tensor([[1.0, 2.0], [4.0, float("nan")]])
    rewards = token_rewards(scores=torch.tensor([1.0, -1.0]), kl=kl, mask=~kl.isnan(), kl_coef=0.5)
    assert_close(rewards.sum(dim=1), torch.tensor([-0.5, -3.0]))

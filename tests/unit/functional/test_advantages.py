"""Rewards, advantages and explained variance: by hand, by definition, at the limits."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.functional.advantages import clip_scores, gae, share_explained, token_rewards
from tests.reference import definitions
from tests.unit.functional.ragged import assert_close, flat, mask, moments, pad, random_rows, unpad


def test_rewards_by_hand() -> None:
    # two rows of 3 and 1 tokens, kl_coef 0.1: the score comes on top of the last token's penalty
    found = token_rewards(
        scores=torch.tensor([1.0, -2.0]),
        kl=torch.tensor([[1.0, 2.0, -3.0], [5.0, 9.0, 9.0]]),
        mask=torch.tensor([[True, True, True], [True, False, False]]),
        kl_coef=0.1,
    )
    assert_close(found, torch.tensor([[-0.1, -0.2, 1.3], [-2.5, 0.0, 0.0]]))


def test_rewards_agree_with_their_definition_whatever_lies_in_the_padding() -> None:
    scores, kl = [0.5, -1.0, 2.0], random_rows(4)
    found = token_rewards(scores=torch.tensor(scores), kl=pad(kl), mask=mask(), kl_coef=0.3)
    for row, score, tokens in zip(unpad(found), scores, kl, strict=True):
        assert_close(torch.tensor(row), torch.tensor(definitions.rewards(score, tokens, 0.3)))
    assert torch.equal(found[~mask()], torch.zeros(9))


def test_without_penalty_the_rewards_of_a_row_add_up_to_its_score() -> None:
    scores = torch.tensor([0.5, -1.0, 2.0])
    found = token_rewards(scores=scores, kl=pad(random_rows(4)), mask=mask(), kl_coef=0.0)
    assert_close(found.sum(dim=1), scores)


def test_the_score_goes_to_the_last_token_of_a_row_that_is_full_and_of_one_that_is_not() -> None:
    counts = torch.tensor([[True, True], [True, False], [False, False]])
    found = token_rewards(scores=torch.tensor([1.0, 2.0, 3.0]), kl=torch.zeros(3, 2), mask=counts, kl_coef=1.0)
    assert found.tolist() == [[0.0, 1.0], [2.0, 0.0], [0.0, 0.0]]


def test_scores_are_cut_at_both_ends() -> None:
    assert clip_scores(torch.tensor([-7.0, -5.0, 4.9, 10.0]), 5.0).tolist() == pytest.approx([-5.0, -5.0, 4.9, 5.0])
    with pytest.raises(ValueError, match="limit above 0"):
        clip_scores(torch.zeros(1), 0.0)


def test_gae_by_hand() -> None:
    # rewards 0, 1; values 0.5, 0.25; gamma 1, lam 0.5
    # delta_1 = 1 - 0.25 = 0.75; delta_0 = 0 + 0.25 - 0.5 = -0.25; A_0 = -0.25 + 0.5 * 0.75 = 0.125
    found = gae(
        rewards=torch.tensor([[0.0, 1.0]]),
        values=torch.tensor([[0.5, 0.25]]),
        mask=torch.tensor([[True, True]]),
        gamma=1.0,
        lam=0.5,
    )
    assert_close(found, torch.tensor([[0.125, 0.75]]))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.0), (0.9, 1.0), (0.0, 0.5), (1.0, 1.0)])
def test_gae_agrees_with_its_definition(gamma: float, lam: float) -> None:
    rewards, values = random_rows(5), random_rows(6)
    found = gae(rewards=pad(rewards), values=pad(values), mask=mask(), gamma=gamma, lam=lam)
    for row, r, v in zip(unpad(found), rewards, values, strict=True):
        assert_close(torch.tensor(row), torch.tensor(definitions.gae(r, v, gamma, lam)))


def test_gae_ignores_what_lies_in_the_padding_and_leaves_zero_there() -> None:
    rewards, values = random_rows(5), random_rows(6)
    found = [
        gae(
            rewards=pad(rewards, rubbish=rubbish),
            values=pad(values, rubbish=rubbish),
            mask=mask(),
            gamma=0.9,
            lam=0.8,
        )
        for rubbish in (float("nan"), 1e30)
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0][~mask()], torch.zeros(9))


def test_with_lam_one_and_no_discount_the_return_is_what_remains_of_the_rewards() -> None:
    rewards, values = random_rows(5), random_rows(6)
    advantages = gae(rewards=pad(rewards), values=pad(values), mask=mask(), gamma=1.0, lam=1.0)
    for row, r, v in zip(unpad(advantages), rewards, values, strict=True):
        returns = [a + value for a, value in zip(row, v, strict=True)]
        assert_close(torch.tensor(returns), torch.tensor([sum(r[t:]) for t in range(len(r))]))


@pytest.mark.parametrize(("gamma", "lam"), [(1.1, 0.5), (-0.1, 0.5), (0.5, 1.1), (0.5, -0.1)])
def test_gae_refuses_what_is_outside_its_range(gamma: float, lam: float) -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        gae(rewards=one, values=one, mask=one.bool(), gamma=gamma, lam=lam)


def explained(values: torch.Tensor, returns: torch.Tensor, counts: torch.Tensor) -> float:
    target = moments(returns, counts)
    square = target.variance + target.mean.square()
    error = moments(returns - values, counts).variance
    return share_explained(unexplained=error, total=target.variance, square=square).item()


def test_explained_variance_agrees_with_its_definition() -> None:
    values, returns = random_rows(7), random_rows(8)
    found = explained(pad(values), pad(returns), mask())
    assert found == pytest.approx(definitions.explained_variance(flat(values), flat(returns)), rel=1e-4)


def test_explained_variance_at_its_limits() -> None:
    returns = torch.tensor([[1.0, 2.0, 4.0]])
    counts = torch.tensor([[True, True, True]])
    assert explained(returns + 5, returns, counts) == pytest.approx(1)
    assert explained(0 * returns, returns, counts) == pytest.approx(0)
    assert explained(-returns, returns, counts) == pytest.approx(-3)
    assert explained(returns, 0 * returns, counts) == 0.0


def test_returns_that_differ_by_rounding_alone_have_nothing_to_explain() -> None:
    returns = torch.tensor([[10.0, 10.0 + 1e-6, 10.0 - 1e-6]])  # one float32 apart: divided by it, -1e12 would come out
    counts = returns > 0
    assert returns.unique().numel() == 3
    assert explained(torch.tensor([[0.0, 5.0, 1.0]]), returns, counts) == 0.0
    spread = torch.tensor([[10.0, 10.001, 9.999]])  # a variance, however small
    assert explained(spread, spread, counts) == pytest.approx(1)


def test_advantages_do_not_depend_on_the_order_of_rows() -> None:
    order, rewards, values = [2, 0, 1], pad(random_rows(5)), pad(random_rows(6))
    found = gae(rewards=rewards, values=values, mask=mask(), gamma=0.9, lam=0.8)
    turned = gae(rewards=rewards[order], values=values[order], mask=mask()[order], gamma=0.9, lam=0.8)
    assert torch.equal(turned, found[order])

"""Upstream's numbers, worked out by hand, and what is wrong with them."""

from __future__ import annotations

from math import log

import torch

from rlhf_core.functional.advantages import token_rewards
from rlhf_core.functional.legacy import legacy_advantages, legacy_sequence_reward, legacy_token_rewards
from tests.reference import definitions
from tests.unit.functional.ragged import assert_close, mask, pad, random_rows


def test_token_rewards_by_hand() -> None:
    # scores 10 and -1 over 2 and 1 tokens, kl_coef 0.1: the first is cut at 5
    found = legacy_token_rewards(
        scores=torch.tensor([10.0, -1.0]),
        kl=torch.tensor([[1.0, -2.0, 9.0], [3.0, float("nan"), float("nan")]]),
        mask=torch.tensor([[True, True, False], [True, False, False]]),
        kl_coef=0.1,
    )
    assert_close(found, torch.tensor([[4.9, 5.2, 0.0], [-1.3, 0.0, 0.0]]))


def test_the_longer_of_two_equally_good_responses_earns_more() -> None:
    scores, counts = torch.ones(3), mask()
    nothing = torch.zeros(3, 6)
    legacy = legacy_token_rewards(scores=scores, kl=nothing, mask=counts, kl_coef=0.0).sum(dim=1)
    ours = token_rewards(scores=scores, kl=nothing, mask=counts, kl_coef=0.0).sum(dim=1)
    assert legacy.tolist() == [5.0, 1.0, 3.0]
    assert ours.tolist() == [1.0, 1.0, 1.0]


def test_the_sequence_reward_by_hand() -> None:
    # ratios 2 and 1/2: 2 - 1 - log 2 and 1/2 - 1 + log 2, mean 1/4
    found = legacy_sequence_reward(
        scores=torch.tensor([1.0]),
        logprobs=torch.tensor([[log(0.5), log(0.25), float("nan")]]),
        ref_logprobs=torch.tensor([[log(0.25), log(0.5), float("nan")]]),
        mask=torch.tensor([[True, True, False]]),
        kl_coef=2.0,
    )
    assert_close(found, torch.tensor([0.5]))


def test_the_sequence_reward_agrees_with_its_definition_whatever_lies_in_the_padding() -> None:
    new, old, scores = random_rows(1), random_rows(2), [0.5, 9.0, -7.0]
    found = legacy_sequence_reward(
        scores=torch.tensor(scores), logprobs=pad(new), ref_logprobs=pad(old), mask=mask(), kl_coef=0.3
    )
    rows = zip(scores, new, old, strict=True)
    assert_close(found, torch.tensor([definitions.legacy_sequence_reward(*row, 0.3) for row in rows]))


def test_the_detached_advantage_is_the_reward_minus_the_mean_value() -> None:
    found = legacy_advantages(
        rewards=torch.tensor([1.0, 2.0]),
        values=torch.tensor([[0.0, 1.0, float("nan")], [0.5, float("nan"), float("nan")]]),
        mask=torch.tensor([[True, True, False], [True, False, False]]),
    )
    assert_close(found, torch.tensor([[0.5, 0.5, 0.0], [1.5, 0.0, 0.0]]))

"""What may be changed about PPO's loss: bounds, weights, importance, and numbers that stay finite."""

from __future__ import annotations

from math import exp, log
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.functional.losses import PolicyTerms, entropy_bonus, policy_loss, value_loss
from tests.reference import definitions
from tests.unit.functional.ragged import LENGTHS, assert_close, flat, mask, pad, random_rows

TOKENS = sum(LENGTHS)


def loss_of(rows: tuple[int, int, int] = (11, 12, 13), order: Any = slice(None), **options: Any) -> PolicyTerms:
    new, old, advantages = (pad(random_rows(seed))[order] for seed in rows)
    counts = mask()[order]
    return policy_loss(
        logprobs=new, old_logprobs=old, advantages=advantages, mask=counts,
        **{"denominator": TOKENS, "clip_eps": 0.2, **options},
    )  # fmt: skip


def one_token(ratio: float, advantage: float, **options: Any) -> tuple[float, float, float]:
    """Loss, its derivative with respect to the logprob, and the clip fraction."""
    logprobs = torch.tensor([[log(ratio)]], requires_grad=True)
    found = policy_loss(
        logprobs=logprobs,
        old_logprobs=torch.zeros(1, 1),
        advantages=torch.tensor([[advantage]]),
        mask=torch.tensor([[True]]),
        denominator=1,
        clip_eps=0.2,
        **options,
    )
    found.loss.backward()
    assert logprobs.grad is not None
    return found.loss.item(), logprobs.grad.item(), found.clipped.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "loss", "gradient", "clipped"),
    [
        (1.4, 1.0, {"clip_eps_high": 0.5}, -1.4, -1.4, 0.0),  # within the higher bound
        (1.6, 1.0, {"clip_eps_high": 0.5}, -1.5, 0.0, 1.0),
        (0.7, -1.0, {"clip_eps_high": 0.5}, 0.8, 0.0, 1.0),  # the lower bound stays where it was
        (2.9, -2.0, {"dual_clip": 3.0}, 5.8, 5.8, 0.0),
        (3.5, -2.0, {"dual_clip": 3.0}, 6.0, 0.0, 1.0),  # bounded: 3 * 2
        (3.5, 2.0, {"dual_clip": 3.0}, -2.4, 0.0, 1.0),  # gains are bounded by the ordinary clip
    ],
)
def test_bounds_by_hand(
    ratio: float, advantage: float, options: dict[str, float], loss: float, gradient: float, clipped: float
) -> None:
    assert one_token(ratio, advantage, **options) == pytest.approx((loss, gradient, clipped), rel=1e-5)


def test_bounds_agree_with_the_definition_by_cases() -> None:
    new, old, advantages = (flat(random_rows(seed)) for seed in (11, 12, 13))
    found = loss_of(clip_eps_high=0.4, dual_clip=1.7)
    tokens = zip(new, old, advantages, strict=True)
    expected = -sum(definitions.objective(*token, low=0.2, high=0.4, dual=1.7) for token in tokens) / TOKENS
    assert found.loss.item() == pytest.approx(expected, rel=1e-5)
    assert found.loss.item() < loss_of(clip_eps_high=0.4).loss.item(), "the dual clip has something to do here"


def test_a_dual_clip_that_nothing_reaches_changes_nothing() -> None:
    assert torch.equal(torch.stack(loss_of(dual_clip=1e6)), torch.stack(loss_of()))
    with pytest.raises(ValueError, match="dual_clip above 1"):
        loss_of(dual_clip=1.0)


def test_weights_and_importance_multiply_each_token() -> None:
    weights, importance = (pad(random_rows(seed)).abs() for seed in (21, 22))
    found = loss_of(weights=weights, importance=importance, denominator=7)
    new, old, advantages = (flat(random_rows(seed)) for seed in (11, 12, 13))
    factors = torch.tensor([w * i for w, i in zip(weights[mask()], importance[mask()], strict=True)])
    tokens = zip(new, old, advantages, strict=True)
    each = torch.tensor([definitions.objective(*token, low=0.2, high=0.2) for token in tokens])
    assert_close(found.loss, -(factors * each).sum() / 7)


def test_diagnostics_count_tokens_whatever_the_loss_weighs() -> None:
    # ratio 2 and 1, advantage 1: one of the two tokens is clipped, and it counts once
    ratio, one = torch.tensor([[2.0, 1.0]]), torch.ones(1, 2)
    found = policy_loss(
        logprobs=ratio.log(), old_logprobs=0 * one, advantages=one, mask=one > 0, denominator=4, clip_eps=0.2,
        weights=torch.tensor([[3.0, 1.0]]),
    )  # fmt: skip
    assert found.clipped.item() == 1.0
    assert found.divergence.item() == pytest.approx(2 - 1 - log(2), rel=1e-5)
    values = value_loss(
        values=ratio, old_values=0 * one, returns=torch.tensor([[3.0, -1.0]]), mask=one > 0, denominator=4,
        clip_eps=0.2, weights=torch.tensor([[3.0, 1.0]]),
    )  # fmt: skip
    assert values.clipped.item() == 1.0


def test_one_count_holds_the_tokens_of_both_clips() -> None:
    """verl counts the ordinary clip (one of four here) and the dual clip (one) apart; TRL and OpenRLHF the first."""
    ratio, gain = torch.tensor([[1.5, 3.5, 1.0, 1.5]]), torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    found = policy_loss(
        logprobs=ratio.log(), old_logprobs=0 * ratio, advantages=gain, mask=ratio > 0, denominator=4, clip_eps=0.2,
        dual_clip=3.0,
    )  # fmt: skip
    assert found.clipped.item() == 2.0


def test_importance_changes_no_diagnostic() -> None:
    plain, weighted = loss_of(), loss_of(importance=torch.full((3, 6), 0.3))
    assert_close(weighted.loss, 0.3 * plain.loss)
    assert torch.equal(torch.stack(weighted[1:]), torch.stack(plain[1:]))


def test_the_largest_ratio_is_that_of_counted_tokens() -> None:
    new, old = flat(random_rows(11)), flat(random_rows(12))
    largest = max(exp(a - b) for a, b in zip(new, old, strict=True))
    assert loss_of().max_ratio.item() == pytest.approx(largest, rel=1e-5)
    one = torch.ones(1, 2)
    found = policy_loss(logprobs=one, old_logprobs=-9 * one, advantages=one, mask=one < 0, denominator=1, clip_eps=0.2)
    assert [term.item() for term in found] == [0.0, 0.0, 0.0, 0.0], "nothing counts"


def test_the_order_of_rows_does_not_matter() -> None:
    for found, expected in zip(loss_of(order=[2, 0, 1]), loss_of(), strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_a_ratio_that_would_overflow_leaves_loss_and_gradient_finite(advantage: float) -> None:
    logprobs = torch.tensor([[0.0, -1.0]], requires_grad=True)
    found = policy_loss(
        logprobs=logprobs,
        old_logprobs=torch.tensor([[-200.0, -1.0]]),
        advantages=torch.tensor([[advantage, 1.0]]),
        mask=torch.tensor([[True, True]]),
        denominator=2,
        clip_eps=0.2,
    )
    found.loss.backward()
    assert logprobs.grad is not None
    assert torch.isfinite(torch.stack([found.loss, found.divergence, found.max_ratio])).all()
    assert torch.isfinite(logprobs.grad).all()
    assert found.max_ratio.item() > 1e15, "the guard must see it"


def test_not_a_number_is_not_hidden() -> None:
    logprobs = pad(random_rows(1), rubbish=0.0)
    logprobs[0, 0] = float("nan")
    found = policy_loss(
        logprobs=logprobs, old_logprobs=0 * pad(random_rows(1), rubbish=0.0), advantages=torch.ones(3, 6),
        mask=mask(), denominator=1, clip_eps=0.2,
    )  # fmt: skip
    assert torch.isnan(found.loss)
    assert torch.isnan(found.max_ratio)


def test_gradients_are_those_of_finite_differences() -> None:
    """Away from the kinks, where the loss has no derivative."""
    generator = torch.Generator().manual_seed(3)

    def draw() -> Tensor:
        return torch.randn(3, 6, generator=generator, dtype=torch.float64)

    old, advantages, weights = draw(), draw(), draw().abs()
    source = (old + 0.7 * draw()).requires_grad_()

    def policy(logprobs: Tensor) -> Tensor:
        return policy_loss(
            logprobs=logprobs, old_logprobs=old, advantages=advantages, mask=mask(), denominator=5.0,
            clip_eps=0.2, clip_eps_high=0.3, dual_clip=1.5, weights=weights,
        ).loss  # fmt: skip

    def value(values: Tensor) -> Tensor:
        return value_loss(
            values=values, old_values=old, returns=advantages, mask=mask(), denominator=5.0, clip_eps=0.3,
            weights=weights,
        ).loss  # fmt: skip

    for loss in (policy, value):
        assert torch.autograd.gradcheck(loss, (source,))


def test_the_weighted_value_loss_by_hand() -> None:
    # errors 1 and 2, weights 1 and 1/4: (1 + 1) / (2 * 2)
    found = value_loss(
        values=torch.tensor([[1.0, 2.0]]), old_values=torch.tensor([[1.0, 2.0]]), returns=torch.zeros(1, 2),
        mask=torch.ones(1, 2, dtype=torch.bool), denominator=2, clip_eps=0.2,
        weights=torch.tensor([[1.0, 0.25]]),
    )  # fmt: skip
    assert found.loss.item() == pytest.approx(0.5)
    assert found.clipped.item() == 0.0


def test_the_entropy_bonus_is_a_weighted_mean_that_padding_does_not_reach() -> None:
    entropy = pad(random_rows(1)).requires_grad_()
    found = entropy_bonus(entropy=entropy, mask=mask(), denominator=TOKENS)
    found.backward()
    assert found.item() == pytest.approx(sum(flat(random_rows(1))) / TOKENS, rel=1e-5)
    assert_close(entropy.grad, torch.where(mask(), 1 / TOKENS, 0.0))

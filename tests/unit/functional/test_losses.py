"""Losses: by hand, by definition, their gradients, and that micro-batches add up."""

from __future__ import annotations

from math import log

import pytest
import torch

from rlhf_core.functional.losses import lm_loss, pairwise_loss, policy_loss, value_loss
from tests.reference import definitions
from tests.unit.functional.ragged import LENGTHS, assert_close, flat, mask, pad, random_rows

TOKENS = sum(LENGTHS)


def one_token(ratio: float, advantage: float, clip_eps: float = 0.2) -> tuple[float, float, float]:
    """Loss, its derivative with respect to the logprob, and the clip fraction, of a single token."""
    logprobs = torch.tensor([[log(ratio)]], requires_grad=True)
    found = policy_loss(
        logprobs=logprobs,
        old_logprobs=torch.zeros(1, 1),
        advantages=torch.tensor([[advantage]]),
        mask=torch.tensor([[True]]),
        denominator=1,
        clip_eps=clip_eps,
    )
    found.loss.backward()
    assert logprobs.grad is not None
    return found.loss.item(), logprobs.grad.item(), found.clipped.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0.0),
        (1.5, 2.0, -2.4, 0.0, 1.0),  # gained enough: -1.2 * 2
        (0.5, 2.0, -1.0, -1.0, 0.0),  # lost where it should gain: the clip does not forgive
        (1.5, -2.0, 3.0, 3.0, 0.0),  # gained where it should lose
        (0.5, -2.0, 1.6, 0.0, 1.0),  # lost enough: 0.8 * 2
    ],
)
def test_policy_loss_by_hand(ratio: float, advantage: float, loss: float, gradient: float, clipped: float) -> None:
    assert one_token(ratio, advantage) == pytest.approx((loss, gradient, clipped), rel=1e-5)


def test_policy_loss_agrees_with_its_definition() -> None:
    new, old, advantages = random_rows(11), random_rows(12), random_rows(13)
    found = policy_loss(
        logprobs=pad(new), old_logprobs=pad(old), advantages=pad(advantages), mask=mask(),
        denominator=TOKENS, clip_eps=0.2,
    )  # fmt: skip
    expected = definitions.policy_loss(flat(new), flat(old), flat(advantages), 0.2) / TOKENS
    assert found.loss.item() == pytest.approx(expected, rel=1e-5)
    assert 0 < found.clipped.item() < TOKENS


def test_with_a_huge_clip_the_loss_is_the_plain_importance_weighted_one() -> None:
    new, old, advantages = random_rows(1), random_rows(2), random_rows(3)
    found = policy_loss(
        logprobs=pad(new), old_logprobs=pad(old), advantages=pad(advantages), mask=mask(),
        denominator=1, clip_eps=1e6,
    )  # fmt: skip
    ratio = (torch.tensor(flat(new)) - torch.tensor(flat(old))).exp()
    assert_close(found.loss, -(ratio * torch.tensor(flat(advantages))).sum())
    assert found.clipped.item() == 0.0


def test_at_ratio_one_the_gradient_is_that_of_the_policy_gradient_theorem() -> None:
    logprobs = pad(random_rows(1), rubbish=0.0).requires_grad_()
    advantages = pad(random_rows(3))
    found = policy_loss(
        logprobs=logprobs, old_logprobs=logprobs.detach(), advantages=advantages, mask=mask(),
        denominator=TOKENS, clip_eps=0.2,
    )  # fmt: skip
    found.loss.backward()
    assert_close(logprobs.grad, torch.where(mask(), -advantages / TOKENS, 0.0))
    assert found.divergence.item() == 0.0


def test_divergence_is_k3_of_the_old_policy() -> None:
    # ratio 2 on one of two tokens: 2 - 1 - log 2, and 0
    found = policy_loss(
        logprobs=torch.tensor([[log(2), 0.0]]), old_logprobs=torch.zeros(1, 2),
        advantages=torch.ones(1, 2), mask=torch.ones(1, 2, dtype=torch.bool),
        denominator=2, clip_eps=0.2,
    )  # fmt: skip
    assert found.divergence.item() == pytest.approx(1 - log(2), rel=1e-5)
    # the mean of OpenRLHF and verl, k1, would be -log(2) / 2 here: a divergence below 0; that of TRL, k2, log(2)^2 / 4


def test_padding_reaches_neither_loss_nor_gradient_of_the_policy() -> None:
    logprobs = pad(random_rows(1)).requires_grad_()  # not a number on padding
    found = policy_loss(
        logprobs=logprobs, old_logprobs=pad(random_rows(2)), advantages=pad(random_rows(3)), mask=mask(),
        denominator=TOKENS, clip_eps=0.2,
    )  # fmt: skip
    found.loss.backward()
    assert logprobs.grad is not None
    assert torch.isfinite(torch.stack(found)).all()
    assert torch.equal(logprobs.grad[~mask()], torch.zeros(9))


def test_losses_of_micro_batches_add_up_to_that_of_the_minibatch() -> None:
    rows = [random_rows(seed) for seed in (1, 2, 3)]
    new, old, third = (pad(row) for row in rows)

    def policy(rows: slice) -> torch.Tensor:
        return policy_loss(
            logprobs=new[rows], old_logprobs=old[rows], advantages=third[rows], mask=mask()[rows],
            denominator=torch.tensor(TOKENS), clip_eps=0.2,
        ).loss  # fmt: skip

    def value(rows: slice) -> torch.Tensor:
        return value_loss(
            values=new[rows], old_values=old[rows], returns=third[rows], mask=mask()[rows],
            denominator=TOKENS, clip_eps=0.2,
        ).loss  # fmt: skip

    for loss in (policy, value):
        assert_close(sum(loss(slice(row, row + 1)) for row in range(3)), loss(slice(0, 3)))


@pytest.mark.parametrize(
    ("value", "target", "loss", "gradient"),
    [
        (0.1, 1.0, 0.405, -0.9),  # within the interval around the old value 0: 0.9^2 / 2
        (0.5, 1.0, 0.32, 0.0),  # beyond it towards the target: 0.8^2 / 2, no more gradient
        (-0.5, 1.0, 1.125, -1.5),  # beyond it away from the target: 1.5^2 / 2
        (2.0, 1.0, 0.5, 1.0),  # past the target: the clipped error 0.8 is the smaller
    ],
)
def test_value_loss_by_hand(value: float, target: float, loss: float, gradient: float) -> None:
    values = torch.tensor([[value]], requires_grad=True)
    found = value_loss(
        values=values, old_values=torch.zeros(1, 1), returns=torch.tensor([[target]]),
        mask=torch.tensor([[True]]), denominator=1, clip_eps=0.2,
    )  # fmt: skip
    found.loss.backward()
    assert values.grad is not None
    assert (found.loss.item(), values.grad.item()) == pytest.approx((loss, gradient), rel=1e-5)
    assert found.clipped.item() == float(gradient == 0.0)


def test_value_loss_counts_no_token_as_clipped_whose_value_is_within_the_interval() -> None:
    """There old + (new - old) is the new value but for its last bit, and so are the errors."""
    draw = torch.Generator().manual_seed(0)
    old, new = (0.2 * torch.rand(50, 40, generator=draw) - 0.1 for _ in range(2))
    target = torch.randn(50, 40, generator=draw)
    found = value_loss(
        values=new, old_values=old, returns=target, mask=torch.ones(50, 40).bool(), denominator=1, clip_eps=0.2
    )
    assert found.clipped.item() == 0.0


def test_value_loss_agrees_with_its_definition() -> None:
    new, old, returns = random_rows(1), random_rows(2), random_rows(3)
    values = pad(new).requires_grad_()
    found = value_loss(
        values=values, old_values=pad(old), returns=pad(returns), mask=mask(),
        denominator=TOKENS, clip_eps=0.3,
    )  # fmt: skip
    expected = definitions.value_loss(flat(new), flat(old), flat(returns), 0.3) / TOKENS
    assert found.loss.item() == pytest.approx(expected, rel=1e-5)
    found.loss.backward()
    assert values.grad is not None
    assert torch.equal(values.grad[~mask()], torch.zeros(9))


def test_lm_loss_is_the_mean_negative_logprob_of_counted_tokens() -> None:
    rows = random_rows(1)
    logprobs = pad(rows).requires_grad_()
    loss = lm_loss(logprobs=logprobs, mask=mask(), denominator=TOKENS)
    assert loss.item() == pytest.approx(-sum(flat(rows)) / TOKENS, rel=1e-5)
    loss.backward()
    assert_close(logprobs.grad, torch.where(mask(), -1 / TOKENS, 0.0))


def test_pairwise_loss_agrees_with_its_definition() -> None:
    chosen, rejected = [1.0, -0.5, 3.0], [0.0, 0.5, 3.0]
    found = pairwise_loss(chosen=torch.tensor(chosen), rejected=torch.tensor(rejected), denominator=3)
    assert found.item() == pytest.approx(definitions.pairwise_loss(chosen, rejected) / 3, rel=1e-5)


def test_pairwise_loss_pulls_the_two_scores_apart() -> None:
    chosen = torch.zeros(1, requires_grad=True)
    rejected = torch.zeros(1, requires_grad=True)
    pairwise_loss(chosen=chosen, rejected=rejected, denominator=1).backward()
    assert (chosen.grad, rejected.grad) == (torch.tensor([-0.5]), torch.tensor([0.5]))


def test_pairwise_loss_neither_overflows_nor_vanishes() -> None:
    worst, best = torch.tensor([-200.0]), torch.tensor([20.0])
    zero = torch.zeros(1)
    assert pairwise_loss(chosen=worst, rejected=zero, denominator=1).item() == pytest.approx(200)
    # log(1 + e^-20) = 2.06e-9; in bfloat16, log(1 + exp) would be 0
    assert pairwise_loss(chosen=best, rejected=zero, denominator=1).item() == pytest.approx(2.06e-9, rel=0.01)
    half = pairwise_loss(chosen=worst.bfloat16(), rejected=zero.bfloat16(), denominator=1)
    assert half.item() == pytest.approx(200)


def test_the_two_forms_of_the_pairwise_loss_are_one_function() -> None:
    chosen, rejected = torch.tensor([1.0, -0.5, 300.0, -300.0]), torch.tensor([0.0, 0.5, 0.0, 0.0])
    gradients = []
    for form in ("log_sigmoid", "log_exp"):
        scores = chosen.clone().requires_grad_()
        loss = pairwise_loss(chosen=scores, rejected=rejected, denominator=4, form=form)
        loss.backward()
        gradients.append(scores.grad)
        # log(1 + e^-1) + log(1 + e^1) + 0 + 300
        assert loss.item() == pytest.approx((0.3132617 + 1.3132617 + 300) / 4, rel=1e-6)
    assert_close(gradients[0], gradients[1])


def test_log_exp_neither_overflows_nor_vanishes_in_half_precision() -> None:
    scores, zero = torch.tensor([-200.0, 20.0]), torch.zeros(2)
    for dtype in (torch.float16, torch.bfloat16):
        found = pairwise_loss(chosen=scores.to(dtype), rejected=zero.to(dtype), denominator=1, form="log_exp")
        assert found.item() == pytest.approx(200)
    small = pairwise_loss(chosen=scores[1:], rejected=zero[1:], denominator=1, form="log_exp")
    assert small.item() == pytest.approx(2.06e-9, rel=0.01)


def test_a_margin_is_what_the_scores_should_differ_by() -> None:
    # 3 - 1 - 2 = 0: log 2; 0 - 1 - 0.5: log(1 + e^1.5) = 1.7014133
    found = pairwise_loss(
        chosen=torch.tensor([3.0, 0.0]), rejected=torch.tensor([1.0, 1.0]), denominator=2,
        margin=torch.tensor([2.0, 0.5]),
    )  # fmt: skip
    assert found.item() == pytest.approx((log(2) + 1.7014133) / 2, rel=1e-6)


def test_centring_pulls_the_sum_of_scores_to_zero_and_leaves_their_difference() -> None:
    chosen, rejected = torch.tensor([3.0], requires_grad=True), torch.tensor([1.0], requires_grad=True)
    plain = pairwise_loss(chosen=chosen, rejected=rejected, denominator=1)
    loss = pairwise_loss(chosen=chosen, rejected=rejected, denominator=1, centring=0.01)
    assert (loss - plain).item() == pytest.approx(0.16, rel=1e-5)  # 0.01 * (3 + 1)^2
    (loss - plain).backward()
    assert_close(torch.stack([chosen.grad, rejected.grad]), torch.full((2, 1), 0.08))  # 2 * 0.01 * (3 + 1)


def test_pairwise_gradients_are_those_worked_out_by_hand() -> None:
    draw = torch.Generator().manual_seed(1)
    chosen, rejected, margin = (torch.randn(4, generator=draw) for _ in range(3))
    for form in ("log_sigmoid", "log_exp"):
        scores = chosen.clone().requires_grad_()
        pairwise_loss(
            chosen=scores, rejected=rejected, denominator=4, margin=margin, centring=0.1, form=form
        ).backward()
        # d/dc = -sigmoid(-(c - r - m)) / 4 + 2 * 0.1 (c + r) / 4
        expected = (-torch.sigmoid(-(chosen - rejected - margin)) + 0.2 * (chosen + rejected)) / 4
        assert_close(scores.grad, expected)

"""coati's loss modules: its constructors and results, with numbers worked out by hand."""

from __future__ import annotations

import inspect
from math import exp, log

import pytest
import torch
from torch.nn import functional as nn_functional

from rlhf_core.coati.loss import GPTLMLoss, LogExpLoss, LogSigLoss, PolicyLoss, ValueLoss
from tests.unit.functional.ragged import assert_close

MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


def test_the_constructors_are_coatis() -> None:
    def defaults(module: type) -> dict[str, object]:
        return {name: parameter.default for name, parameter in inspect.signature(module).parameters.items()}

    assert defaults(PolicyLoss) == {"clip_eps": 0.2, "skip_threshold": 20.0}
    assert defaults(ValueLoss) == {"clip_eps": 0.2}
    assert [list(module().children()) for module in (GPTLMLoss, LogSigLoss, LogExpLoss)] == [[], [], []]


def test_the_policy_loss_is_a_mean_over_responses_of_means_over_tokens() -> None:
    # ratios 1.5 (clipped to 1.2) and 1 with advantage 1, then 0.5 with advantage 2; the rest is padding
    log_probs = torch.tensor([[log(1.5), 0.0, float("nan")], [log(0.5), 9.0, 9.0]], requires_grad=True)
    advantages = torch.tensor([[1.0, 1.0, 5.0], [2.0, 5.0, 5.0]])
    loss, skip, max_ratio = PolicyLoss()(log_probs, torch.zeros(2, 3), advantages, MASK)
    assert loss.item() == pytest.approx(-((1.2 + 1.0) / 2 + 1.0) / 2, rel=1e-5)
    assert (skip, max_ratio.item()) == (False, pytest.approx(1.5, rel=1e-5))
    loss.backward()
    assert log_probs.grad is not None
    assert_close(log_probs.grad, torch.tensor([[0.0, -0.25, 0.0], [-0.5, 0.0, 0.0]]))


def test_one_advantage_for_a_response_serves_all_its_tokens() -> None:
    log_probs = torch.tensor([[0.0, log(1.1)]])
    wide = PolicyLoss()(log_probs, torch.zeros(1, 2), torch.full((1, 2), -2.0))
    narrow = PolicyLoss()(log_probs, torch.zeros(1, 2), torch.full((1, 1), -2.0))
    assert narrow.loss.item() == wide.loss.item() == pytest.approx(2.1, rel=1e-5)


def test_one_exploding_token_among_many_is_skipped() -> None:
    log_probs = torch.zeros(1, 50)
    log_probs[0, 7] = log(30)
    loss, skip, max_ratio = PolicyLoss(skip_threshold=20.0)(log_probs, torch.zeros(1, 50), torch.ones(1, 50))
    assert skip is True, "the mean ratio of coati would be 1.6"
    assert max_ratio.item() == pytest.approx(30, rel=1e-5)
    assert torch.isfinite(loss)
    assert PolicyLoss(skip_threshold=31.0)(log_probs, torch.zeros(1, 50), torch.ones(1, 50)).skip is False


def test_the_value_loss_is_half_a_mean_over_tokens_of_clipped_squares() -> None:
    # targets advantage + old value: 1, 1 and 0; errors 0.5 (clipped to 0.8), 0.9 and 2
    values = torch.tensor([[0.5, 0.1, 7.0], [2.0, 7.0, 7.0]])
    old = torch.tensor([[0.0, 0.0, 7.0], [2.0, 7.0, 7.0]])
    advantage = torch.tensor([[1.0, 1.0, 0.0], [-2.0, 0.0, 0.0]])
    found = ValueLoss(clip_eps=0.2)(values, old, advantage, MASK)
    assert found.item() == pytest.approx((0.64 + 0.81 + 4.0) / 3 / 2, rel=1e-5)


def test_the_language_model_loss_is_torchs_cross_entropy_of_shifted_labels() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 11, generator=generator, requires_grad=True)
    labels = torch.randint(11, (2, 5), generator=generator)
    labels[0, 3:] = labels[1, :2] = -100
    expected = nn_functional.cross_entropy(logits[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1))
    found = GPTLMLoss()(logits, labels)
    assert_close(found, expected)
    assert_close(*(torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (found, expected)))


def test_labels_of_nothing_give_zero_not_nan() -> None:
    assert GPTLMLoss()(torch.randn(1, 3, 4), torch.full((1, 3), -100)).item() == 0.0


@pytest.mark.parametrize("module", [LogSigLoss(), LogExpLoss()])
def test_the_pairwise_losses_by_hand(module: torch.nn.Module) -> None:
    chosen, rejected = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [2.0]])
    expected = (log(1 + exp(-1)) + log(1 + exp(2))) / 2
    assert module(chosen, rejected).item() == pytest.approx(expected, rel=1e-6)
    assert module(-300 * chosen.half(), 0 * rejected.half()).item() == pytest.approx((300 + log(2)) / 2, rel=1e-5)


def test_a_log_ratio_of_12_in_float16_is_clipped_not_nan() -> None:
    log_probs = torch.tensor([[12.0, 0.0]], dtype=torch.float16, requires_grad=True)
    loss, skip, max_ratio = PolicyLoss()(log_probs, torch.zeros(1, 2).half(), torch.ones(1, 2).half())
    assert loss.item() == pytest.approx(-(1.2 + 1) / 2, rel=1e-6)
    assert (skip, max_ratio.item()) == (True, pytest.approx(exp(12), rel=1e-5))  # infinite in float16
    loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[0.0, -0.5]]


def test_a_value_off_by_300_in_float16_has_a_finite_loss() -> None:
    values = torch.tensor([[300.0]], dtype=torch.float16)
    assert ValueLoss()(values, values, -values).item() == 300**2 / 2  # 90,000 is infinite in float16


def test_losses_of_float64_lose_no_digit() -> None:
    log_probs, zero = torch.tensor([[0.1, 0.05, 0.0]]).double(), torch.zeros(1, 3).double()
    found = PolicyLoss()(log_probs, zero, zero + 1)
    ratios = [exp(each) for each in log_probs[0].tolist()]
    assert found.loss.item() == pytest.approx(-sum(ratios) / 3, rel=1e-15)  # a third in float32 is off by 1e-8
    for module in (LogSigLoss(), LogExpLoss()):
        difference = log_probs[0, 0].item()
        assert module(log_probs[:, 0], zero[:, 0]).item() == pytest.approx(log(1 + exp(-difference)), rel=1e-15)

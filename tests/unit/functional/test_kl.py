"""The three estimators: by hand, in expectation, and on padding."""

from __future__ import annotations

from math import exp, log

import pytest
import torch

from rlhf_core.functional.kl import KLEstimator, kl
from tests.reference import definitions
from tests.unit.functional.ragged import assert_close, mask, pad, random_rows

POLICY, REFERENCE = [0.5, 0.3, 0.2], [0.4, 0.4, 0.2]


def of_one_token(p: float, q: float, estimator: KLEstimator) -> float:
    found = kl(
        logprobs=torch.tensor([[log(p)]]),
        ref_logprobs=torch.tensor([[log(q)]]),
        mask=torch.tensor([[True]]),
        estimator=estimator,
    )
    return found.item()


def test_the_three_estimators_by_hand() -> None:
    # p = 1/2, q = 1/4: d = log 2
    assert of_one_token(0.5, 0.25, "k1") == pytest.approx(log(2), rel=1e-5)
    assert of_one_token(0.5, 0.25, "k2") == pytest.approx(log(2) ** 2 / 2, rel=1e-5)
    assert of_one_token(0.5, 0.25, "k3") == pytest.approx(0.5 - 1 + log(2), rel=1e-5)
    # p = 1/4, q = 1/2: k1 is negative, the others are not
    assert of_one_token(0.25, 0.5, "k1") == pytest.approx(-log(2), rel=1e-5)
    assert of_one_token(0.25, 0.5, "k3") == pytest.approx(2 - 1 - log(2), rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_unbiased_estimators_average_to_the_divergence(estimator: KLEstimator) -> None:
    pairs = list(zip(POLICY, REFERENCE, strict=True))
    average = sum(p * of_one_token(p, q, estimator) for p, q in pairs)
    assert average == pytest.approx(definitions.divergence(POLICY, REFERENCE), rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_padding_counts_nothing_and_equal_policies_differ_by_nothing(estimator: KLEstimator) -> None:
    logprobs, reference = pad(random_rows(1)), pad(random_rows(2))
    found = kl(logprobs=logprobs, ref_logprobs=reference, mask=mask(), estimator=estimator)
    assert torch.equal(found[~mask()], torch.zeros(9))
    assert (found[mask()] != 0).all()
    same = kl(logprobs=logprobs, ref_logprobs=logprobs, mask=mask(), estimator=estimator)
    assert torch.equal(same, torch.zeros(3, 6))


def test_k3_keeps_small_differences() -> None:
    # exp(-d) - 1 + d is d^2 / 2 for small d: 5e-9 here, which float32 loses unless expm1 is used
    found = kl(
        logprobs=torch.tensor([[1e-4]]),
        ref_logprobs=torch.tensor([[0.0]]),
        mask=torch.tensor([[True]]),
        estimator="k3",
    )
    assert found.item() == pytest.approx(exp(-1e-4) - 1 + 1e-4, rel=0.05)


def test_order_of_rows_does_not_matter() -> None:
    logprobs, reference, order = pad(random_rows(1)), pad(random_rows(2)), [2, 0, 1]
    found = kl(logprobs=logprobs, ref_logprobs=reference, mask=mask(), estimator="k3")
    turned = kl(logprobs=logprobs[order], ref_logprobs=reference[order], mask=mask()[order], estimator="k3")
    assert_close(turned, found[order])


@pytest.mark.parametrize(("estimator", "direction"), [("k1", None), ("k2", "policy"), ("k3", "reference")])
def test_differentiated_under_the_sampled_tokens_only_k2_is_the_divergences_gradient(
    estimator: KLEstimator, direction: str | None
) -> None:
    # why none of them is a loss here: E_pi[grad k1] = 0, E_pi[grad k3] = grad KL(ref || pi)
    logits = torch.tensor(POLICY, dtype=torch.float64).log().requires_grad_()
    reference = torch.tensor(REFERENCE, dtype=torch.float64).log()
    logprobs = torch.log_softmax(logits, dim=0)
    each = kl(
        logprobs=logprobs[None],
        ref_logprobs=reference[None],
        mask=torch.ones(1, 3, dtype=torch.bool),
        estimator=estimator,
    )
    (found,) = torch.autograd.grad((logprobs.detach().exp() * each[0]).sum(), logits, retain_graph=True)
    exact = {
        None: 0 * logprobs.sum(),
        "policy": (logprobs.exp() * (logprobs - reference)).sum(),
        "reference": (reference.exp() * (reference - logprobs)).sum(),
    }[direction]
    (expected,) = torch.autograd.grad(exact, logits)
    torch.testing.assert_close(found, expected)

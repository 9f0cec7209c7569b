"""Log-probabilities and entropy against the definition and against torch's own log-softmax."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.functional.logprobs import entropy, logprobs_from_logits
from tests.reference import definitions
from tests.unit.functional.ragged import assert_close


def logits(*, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


TOKENS = torch.tensor([[0, 6, 3], [2, 2, 5]])


def test_a_logprob_by_hand() -> None:
    # exp(0), exp(log 3), exp(log 4): probabilities 1/8, 3/8, 4/8
    row = torch.tensor([[[0.0, math.log(3), math.log(4)]]])
    found = logprobs_from_logits(row, torch.tensor([[1]]), temperature=1.0)
    assert_close(found, torch.tensor([[math.log(3 / 8)]]))
    # at temperature 1/2 the weights are squared: 1, 9, 16
    found = logprobs_from_logits(row, torch.tensor([[1]]), temperature=0.5)
    assert_close(found, torch.tensor([[math.log(9 / 26)]]))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_agree_with_their_definition(temperature: float) -> None:
    found = logprobs_from_logits(logits(), TOKENS, temperature=temperature)
    for b in range(2):
        for a in range(3):
            expected = definitions.log_softmax(logits()[b, a].tolist(), temperature)[TOKENS[b, a]]
            assert found[b, a].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_entropy_agrees_with_its_definition(temperature: float) -> None:
    found = entropy(logits(), temperature=temperature)
    for b in range(2):
        for a in range(3):
            expected = definitions.entropy(logits()[b, a].tolist(), temperature)
            assert found[b, a].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_half_precision_logits_are_worked_on_in_float32() -> None:
    half = logits(dtype=torch.bfloat16)
    found = logprobs_from_logits(half, TOKENS, temperature=1.0)
    whole = torch.log_softmax(half.float(), dim=-1)
    assert found.dtype == entropy(half, temperature=1.0).dtype == torch.float32
    assert_close(found, whole.gather(-1, TOKENS[..., None]).squeeze(-1))


def test_the_gradient_is_one_hot_minus_softmax() -> None:
    scores = logits().requires_grad_()
    logprobs_from_logits(scores, TOKENS, temperature=2.0).sum().backward()
    one_hot = torch.nn.functional.one_hot(TOKENS, 7).float()
    assert_close(scores.grad, (one_hot - torch.softmax(logits() / 2, dim=-1)) / 2)


def test_huge_logits_overflow_nothing() -> None:
    scores = torch.tensor([[[1e4, -1e4, 0.0]]])
    assert_close(logprobs_from_logits(scores, torch.tensor([[0]]), temperature=1.0), torch.zeros(1, 1))
    assert_close(entropy(scores, temperature=1.0), torch.zeros(1, 1))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature above 0"):
        logprobs_from_logits(logits(), TOKENS, temperature=temperature)

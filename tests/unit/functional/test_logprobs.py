"""Log-probabilities and entropy against the definition and against torch's own log-softmax."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.functional import logprobs as module
from rlhf_core.functional.logprobs import entropy, logprobs_and_entropy, logprobs_from_logits
from tests.reference import definitions
from tests.unit.functional.ragged import assert_close


@pytest.fixture(autouse=True, params=["by kernels", "by PyTorch"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "by PyTorch":
        monkeypatch.setattr(module, "has_kernels", lambda _: False)
    else:
        assert module.has_kernels(logits())
    return str(request.param)


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


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_both_at_once_are_what_each_is_alone(temperature: float) -> None:
    both = logprobs_and_entropy(logits(), TOKENS, temperature=temperature, entropy_needs_grad=False)
    assert torch.equal(both.logprobs, logprobs_from_logits(logits(), TOKENS, temperature=temperature))
    assert torch.equal(both.entropy, entropy(logits(), temperature=temperature))
    distribution = torch.distributions.Categorical(logits=logits() / temperature)
    assert_close(both.logprobs, distribution.log_prob(TOKENS))
    assert_close(both.entropy, distribution.entropy())


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_gradients_of_both_are_those_of_finite_differences(temperature: float) -> None:
    source = logits(dtype=torch.float64).requires_grad_()
    for needs_grad, terms in ((True, 2), (False, 1)):

        def both(scores: torch.Tensor, needs_grad: bool = needs_grad, terms: int = terms) -> tuple[torch.Tensor, ...]:
            found = logprobs_and_entropy(scores, TOKENS, temperature=temperature, entropy_needs_grad=needs_grad)
            return found[:terms]

        assert torch.autograd.gradcheck(both, (source,))


def test_gradients_of_both_are_those_of_torch() -> None:
    ours, theirs = logits().requires_grad_(), logits().requires_grad_()
    found = logprobs_and_entropy(ours, TOKENS, temperature=0.7, entropy_needs_grad=True)
    distribution = torch.distributions.Categorical(logits=theirs / 0.7)
    pull = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.0, -1.0]])
    (pull * found.logprobs + pull.square() * found.entropy).sum().backward()
    (pull * distribution.log_prob(TOKENS) + pull.square() * distribution.entropy()).sum().backward()
    assert_close(ours.grad, theirs.grad)


def test_an_entropy_that_is_only_looked_at_has_no_gradient() -> None:
    found = logprobs_and_entropy(logits().requires_grad_(), TOKENS, temperature=1.0, entropy_needs_grad=False)
    assert (found.logprobs.requires_grad, found.entropy.requires_grad) == (True, False)


@pytest.mark.parametrize("elements", [1, 14, 15, 28])
def test_the_size_of_the_slices_changes_nothing(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[torch.Tensor]:
        scores = logits().requires_grad_()
        found = logprobs_and_entropy(scores, TOKENS, temperature=0.7, entropy_needs_grad=True)
        (found.logprobs - 3 * found.entropy).sum().backward()
        assert scores.grad is not None
        return [found.logprobs.detach(), found.entropy.detach(), scores.grad]

    whole = run()
    monkeypatch.setattr(module, "_SLICE_ELEMENTS", elements)
    assert all(torch.equal(found, expected) for found, expected in zip(run(), whole, strict=True))


def test_logits_that_are_a_view_give_what_a_copy_gives_and_are_not_changed() -> None:
    wide = torch.randn(2, 6, 7, generator=torch.Generator().manual_seed(1))
    before = wide.clone()
    found = logprobs_and_entropy(wide[:, 2:-1], TOKENS, temperature=1.0, entropy_needs_grad=True)
    copied = logprobs_and_entropy(wide[:, 2:-1].clone(), TOKENS, temperature=1.0, entropy_needs_grad=True)
    assert torch.equal(found.logprobs, copied.logprobs)
    assert torch.equal(found.entropy, copied.entropy)
    assert torch.equal(wide, before)


def test_half_precision_logits_get_half_precision_gradients_that_float32_would_round_to() -> None:
    half = logits(dtype=torch.bfloat16).requires_grad_()
    logprobs_from_logits(half, TOKENS, temperature=1.0).sum().backward()
    one_hot = torch.nn.functional.one_hot(TOKENS, 7).float()
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16
    exact = one_hot - torch.softmax(half.detach().float(), dim=-1)
    torch.testing.assert_close(half.grad.float(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_vocabulary_is_as_near_to_exact_numbers_as_log_softmax(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    scores = (torch.randn(3, 5, 50_001, generator=generator) * 4).to(dtype).requires_grad_()
    tokens = torch.randint(0, 50_001, (3, 5), generator=generator)
    pulls = [torch.randn(3, 5, generator=generator) for _ in range(2)]
    found = logprobs_and_entropy(scores, tokens, temperature=0.7, entropy_needs_grad=True)
    (pulls[0] * found.logprobs + pulls[1] * found.entropy).sum().backward()
    exact = scores.detach().double().requires_grad_()
    every = torch.log_softmax(exact / 0.7, dim=-1)
    right = every.gather(-1, tokens[..., None]).squeeze(-1), -(every.exp() * every).sum(dim=-1)
    (pulls[0] * right[0] + pulls[1] * right[1]).sum().backward()
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-5)
    assert scores.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(
        scores.grad.double(), exact.grad, rtol=2**-8 if dtype == torch.bfloat16 else 1e-4, atol=1e-7
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_asked_for_an_entropy_or_not_a_logprob_has_the_same_bits(dtype: torch.dtype) -> None:
    scores = (torch.randn(4, 9, 5003, generator=torch.Generator().manual_seed(3)) * 4).to(dtype)
    tokens = torch.randint(0, 5003, (4, 9), generator=torch.Generator().manual_seed(4))
    alone = logprobs_from_logits(scores, tokens, temperature=0.9)
    found = logprobs_and_entropy(scores, tokens, temperature=0.9, entropy_needs_grad=True)
    assert torch.equal(alone, found.logprobs)


def test_tokens_of_another_shape_are_refused() -> None:
    with pytest.raises(RuntimeError):
        module._TokenStatistics.apply(logits(), TOKENS[:, :2], 1.0, None, False, False)


def test_a_token_that_is_no_word_is_refused() -> None:
    for wrong in (7, -1):
        with pytest.raises(RuntimeError, match="out of bounds"):
            logprobs_from_logits(logits(), TOKENS + (wrong - TOKENS) * (TOKENS == 5), temperature=1.0)


def test_words_that_cannot_come_add_nothing() -> None:
    banned = torch.tensor([[[0.0, math.log(3), -math.inf]]], requires_grad=True)
    found = logprobs_and_entropy(banned, torch.tensor([[1]]), temperature=1.0, entropy_needs_grad=True)
    # probabilities 1/4, 3/4, 0
    assert_close(found.entropy.detach(), torch.tensor([[-(math.log(1 / 4) / 4 + 3 * math.log(3 / 4) / 4)]]))
    (found.logprobs + found.entropy).sum().backward()
    assert banned.grad is not None
    assert banned.grad[0, 0, 2].item() == 0.0
    assert torch.isfinite(banned.grad).all()


def test_no_tensor_of_the_size_of_the_logits_is_made_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation of both passes is watched: only the gradient itself is as large as the logits."""
    monkeypatch.setattr(module, "_SLICE_ELEMENTS", 2 * 7)
    scores = logits(dtype=torch.bfloat16).requires_grad_()
    largest: list[tuple[int, torch.dtype]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            is_view = func.is_view or torch.Tag.inplace_view in func.tags
            if isinstance(found, torch.Tensor) and found.numel() >= scores.numel() and not is_view:
                largest.append((found.numel(), found.dtype))
            return found

    with Watch():
        found = logprobs_and_entropy(scores, TOKENS, temperature=0.7, entropy_needs_grad=True)
        (found.logprobs + found.entropy).sum().backward()
    assert largest == [(scores.numel(), torch.bfloat16)]

"""Uniforms depend on their key alone, and tokens follow the softmax."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch

from rlhf_core.errors import ModelError
from rlhf_core.generation import choose_greedy, choose_sampled, sample_uniforms


def uniforms(keys: list[str], samples: list[int], length: int = 5, *, seed: int = 3, episode: int = 1):
    return sample_uniforms(seed=seed, episode=episode, keys=keys, samples=samples, max_new_tokens=length)


def test_a_row_of_uniforms_does_not_depend_on_the_rows_around_it() -> None:
    alone = uniforms(["b"], [2])
    among_others = uniforms(["a", "b", "c"], [0, 2, 1])
    assert torch.equal(alone[0], among_others[1])


def test_a_longer_draw_continues_a_shorter_one() -> None:
    assert torch.equal(uniforms(["a"], [0], length=9)[:, :5], uniforms(["a"], [0], length=5))


def test_every_part_of_the_key_changes_the_row() -> None:
    rows = [
        uniforms(["a"], [0]),
        uniforms(["b"], [0]),
        uniforms(["a"], [1]),
        uniforms(["a"], [0], episode=2),
        uniforms(["a"], [0], seed=4),
        uniforms(["a1"], [1]),  # not to be taken for prompt "a", sample 11
        uniforms(["a"], [11]),
    ]
    assert len({tuple(row[0].tolist()) for row in rows}) == len(rows)


def test_uniforms_are_the_top_24_bits_of_a_philox_stream() -> None:
    key = int.from_bytes(hashlib.sha256(b"3\x001\x00a\x000").digest()[:16], "little")
    words = np.random.Philox(key=key).random_raw(5)
    expected = [int(word) // 2**40 / 2**24 for word in words]
    assert uniforms(["a"], [0])[0].tolist() == expected


def test_uniforms_are_spread_evenly_over_the_unit_interval() -> None:
    draws = uniforms([f"prompt {i}" for i in range(500)], [0] * 500, length=20).flatten()
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = torch.histc(draws, bins=10, min=0, max=1)
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 27.9  # 0.1 % point of 9 degrees of freedom


@cache
def drawn(n: int) -> torch.Tensor:
    """The first number of each of many prompts."""
    return uniforms([f"p{i}" for i in range(n)], [0] * n, length=1)[:, 0]


def test_samples_follow_the_softmax_at_a_temperature() -> None:
    logits, temperature, n = torch.tensor([2.0, 0.0, -1.0, 0.5, 1.0, -torch.inf]), 0.7, 20_000
    draws = drawn(n)
    tokens = choose_sampled(logits=logits.expand(n, -1), uniforms=draws, temperature=temperature).tokens
    weights = np.exp(logits.numpy().astype(np.float64) / temperature)
    expected = n * weights / weights.sum()
    counts = np.bincount(tokens.numpy(), minlength=6)
    assert counts[5] == 0
    chi_square = ((counts[:5] - expected[:5]) ** 2 / expected[:5]).sum()
    assert chi_square < 18.47  # 0.1 % point of 4 degrees of freedom


def test_the_token_is_where_the_cumulative_distribution_passes_the_uniform_number() -> None:
    probabilities = torch.tensor([0.25, 0.5, 0.25])
    numbers = torch.tensor([0.0, 0.2, 0.3, 0.7, 0.8])
    choice = choose_sampled(logits=probabilities.log().expand(5, -1), uniforms=numbers, temperature=1.0)
    assert choice.tokens.tolist() == [0, 0, 1, 1, 2]
    torch.testing.assert_close(choice.log_probs.exp(), torch.tensor([0.25, 0.25, 0.5, 0.5, 0.25]))


@pytest.mark.parametrize("number", [0.0, 1 - 2**-24])
def test_a_token_of_probability_zero_is_never_drawn(number: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.3, -0.7, -torch.inf]])
    choice = choose_sampled(logits=logits, uniforms=torch.tensor([number]), temperature=1.0)
    assert choice.tokens.item() == (1 if number == 0 else 2)
    assert choice.log_probs.isfinite().all()


def test_log_probs_of_samples_are_those_of_the_tempered_softmax() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    choice = choose_sampled(logits=logits, uniforms=torch.tensor([0.1, 0.4, 0.6, 0.9]), temperature=1.7)
    expected = torch.log_softmax(logits / 1.7, -1)[torch.arange(4), choice.tokens]
    torch.testing.assert_close(choice.log_probs, expected, rtol=1e-5, atol=1e-6)


def test_greedy_takes_the_largest_logit_with_its_log_probability() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 2.0]], dtype=torch.bfloat16)
    choice = choose_greedy(logits)
    assert choice.tokens.tolist() == [1, 0]
    torch.testing.assert_close(choice.log_probs, torch.log_softmax(logits.float(), -1).max(-1).values)


def test_logits_that_are_not_numbers_are_reported() -> None:
    with pytest.raises(ModelError, match="diverged"):
        choose_greedy(torch.tensor([[0.0, torch.nan]]))


def cut_distribution(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Return the probabilities that are drawn from, by the slow definition: sort, keep, share out anew."""
    weights = np.exp(logits.double().numpy() / temperature)
    order = np.argsort(-weights)
    if top_k:
        weights[order[top_k:]] = 0
    weights /= weights.sum()
    kept, mass = 0, 0.0
    while mass < top_p and kept < len(order):
        mass += weights[order[kept]]
        kept += 1
    if top_p < 1:
        weights[order[kept:]] = 0
    return weights / weights.sum()


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (4, 1.0), (0, 0.8), (7, 0.9), (1, 1.0), (0, 1e-6), (100, 0.99)])
def test_samples_follow_the_softmax_cut_to_top_k_and_top_p(top_k: int, top_p: float) -> None:
    logits, temperature, n = torch.randn(12, generator=torch.Generator().manual_seed(1)) * 2, 0.8, 20_000
    draws = drawn(n)
    choice = choose_sampled(
        logits=logits.expand(n, -1), uniforms=draws, temperature=temperature, top_k=top_k, top_p=top_p
    )
    probabilities = cut_distribution(logits, temperature, top_k, top_p)
    inside = probabilities > 0
    counts = np.bincount(choice.tokens.numpy(), minlength=12)
    assert not counts[~inside].any()
    expected = n * probabilities[inside]
    chi_square = ((counts[inside] - expected) ** 2 / expected).sum()
    freedom = inside.sum() - 1
    assert chi_square < freedom + 4.5 * np.sqrt(2 * freedom) + 1e-2  # beyond the 0.1 % point of each
    np.testing.assert_allclose(choice.log_probs.numpy(), np.log(probabilities[choice.tokens]), rtol=1e-4, atol=1e-5)


def test_tokens_as_likely_as_the_last_one_kept_are_kept_too() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    for cut in ({"top_k": 2}, {"top_p": 0.6}, {"top_k": 2, "top_p": 0.9}):
        drawn = {
            choose_sampled(logits=logits, uniforms=torch.tensor([number]), temperature=1.0, **cut).tokens.item()
            for number in (0.0, 0.5, 0.7, 0.9, 0.999)
        }
        assert drawn == {0, 1, 2}


def test_tokens_that_together_have_exactly_top_p_are_enough() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    assert choose_sampled(logits=logits, uniforms=torch.tensor([0.99]), temperature=1.0, top_p=0.5).tokens == 0


def test_the_choice_is_that_of_exact_arithmetic() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 3000, generator=generator) * 4
    numbers = torch.rand(64, generator=generator)
    numbers[:2] = torch.tensor([0.0, 1 - 2**-24])
    tokens = choose_sampled(logits=logits, uniforms=numbers, temperature=1.0).tokens.tolist()
    for row, number, token in zip(logits, numbers.tolist(), tokens, strict=True):
        relative = (row - row.max()).exp()
        weights = [int(Fraction(value) * 2**40) for value in relative.tolist()]
        target = Fraction(int(number * 2**24), 2**24) * sum(weights)
        below = sum(weights[:token])
        assert below <= target < below + weights[token]


def test_a_large_even_vocabulary_is_inverted_to_the_last_token() -> None:
    vocabulary = 2**18
    numbers = torch.tensor([0.0, 0.25, 0.5, 1 - 2**-18, 1 - 2**-24])
    tokens = choose_sampled(logits=torch.zeros(5, vocabulary), uniforms=numbers, temperature=1.0).tokens
    assert tokens.tolist() == [0, vocabulary // 4, vocabulary // 2, vocabulary - 1, vocabulary - 1]

"""Weights of tokens: the mean that they make, on one rank and on several, and truncated importance."""

from __future__ import annotations

from math import log

import pytest
import torch

from rlhf_core.functional.losses import entropy_bonus, policy_loss
from rlhf_core.functional.weights import (
    Aggregation,
    aggregation_count,
    aggregation_weights,
    importance_weights,
)
from tests.unit.functional.ragged import LENGTHS, assert_close, mask, pad, random_rows

AGGREGATIONS: tuple[Aggregation, ...] = ("token_mean", "sequence_mean", "constant_length")
LONGEST = 10


def mean_by_definition(rows: list[list[float]], aggregation: Aggregation) -> float:
    match aggregation:
        case "token_mean":
            return sum(sum(row) for row in rows) / sum(len(row) for row in rows)
        case "sequence_mean":
            return sum(sum(row) / len(row) for row in rows) / len(rows)
        case "constant_length":
            return sum(sum(row) / LONGEST for row in rows) / len(rows)


def test_weights_by_hand() -> None:
    counts = torch.tensor([[True, True, False], [True, False, False]])
    found = {name: aggregation_weights(counts, aggregation=name, max_tokens=4).tolist() for name in AGGREGATIONS}
    assert found["token_mean"] == [[1, 1, 0], [1, 0, 0]]
    assert found["sequence_mean"] == [[0.5, 0.5, 0], [1, 0, 0]]
    assert found["constant_length"] == [[0.25, 0.25, 0], [0.25, 0, 0]]
    assert [aggregation_count(counts, aggregation=name).item() for name in AGGREGATIONS] == [3, 2, 2]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_mean_agrees_with_its_definition_however_rows_are_split_over_ranks(aggregation: Aggregation) -> None:
    rows = random_rows(1)
    values, counts = pad(rows), mask()
    for ranks in ([slice(0, 3)], [slice(0, 1), slice(1, 3)], [slice(0, 1), slice(1, 2), slice(2, 3)]):
        denominator = sum(aggregation_count(counts[part], aggregation=aggregation) for part in ranks)
        found = sum(
            entropy_bonus(
                entropy=values[part],
                mask=counts[part],
                denominator=denominator,
                weights=aggregation_weights(counts[part], aggregation=aggregation, max_tokens=LONGEST),
            )
            for part in ranks
        )
        assert float(found) == pytest.approx(mean_by_definition(rows, aggregation), rel=1e-5)


def test_a_row_without_tokens_changes_no_mean() -> None:
    counts = torch.cat([mask(), torch.zeros(1, 6, dtype=torch.bool)])
    for name in AGGREGATIONS:
        assert aggregation_count(counts, aggregation=name) == aggregation_count(mask(), aggregation=name)
        weights = aggregation_weights(counts, aggregation=name, max_tokens=LONGEST)
        assert torch.equal(weights[3], torch.zeros(6))


def test_rows_of_equal_length_make_all_aggregations_equal() -> None:
    counts = torch.ones(2, 4, dtype=torch.bool)
    losses = [
        policy_loss(
            logprobs=torch.tensor([[-1.0, -2.0, -0.5, -3.0]] * 2),
            old_logprobs=torch.full((2, 4), -1.5),
            advantages=torch.tensor([[1.0, -1.0, 2.0, 0.5]] * 2),
            mask=counts,
            denominator=aggregation_count(counts, aggregation=name),
            clip_eps=0.2,
            weights=aggregation_weights(counts, aggregation=name, max_tokens=4),
        ).loss
        for name in AGGREGATIONS
    ]
    assert_close(losses[1], losses[0])
    assert_close(losses[2], losses[0])


def test_a_length_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        aggregation_weights(mask(), aggregation="constant_length", max_tokens=0)


def test_importance_by_hand() -> None:
    # pi / mu: 0.4 / 0.2 = 2, 0.1 / 0.4 = 1/4, 0.9 / 0.1 = 9 cut at 3
    found = importance_weights(
        logprobs=torch.tensor([[log(0.4), log(0.1), log(0.9)]]),
        behaviour_logprobs=torch.tensor([[log(0.2), log(0.4), log(0.1)]]),
        mask=torch.ones(1, 3, dtype=torch.bool),
        cap=3.0,
    )
    assert_close(found, torch.tensor([[2.0, 0.25, 3.0]]))


def test_importance_has_no_gradient_and_nothing_on_padding() -> None:
    logprobs = pad(random_rows(1)).requires_grad_()
    found = importance_weights(logprobs=logprobs, behaviour_logprobs=pad(random_rows(2)), mask=mask(), cap=1e9)
    assert not found.requires_grad
    assert torch.equal(found[~mask()], torch.zeros(sum(6 - length for length in LENGTHS)))


def test_with_a_cap_that_nothing_reaches_weighted_means_are_unbiased() -> None:
    # E_mu[(pi / mu) f] = E_pi[f], summed over a vocabulary of three; f = 1, 2, 5
    pi, mu, f = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [1.0, 2.0, 5.0]
    weights = importance_weights(
        logprobs=torch.tensor([pi]).log(),
        behaviour_logprobs=torch.tensor([mu]).log(),
        mask=torch.ones(1, 3, dtype=torch.bool),
        cap=100.0,
    )
    found = (torch.tensor(mu) * weights[0] * torch.tensor(f)).sum().item()
    assert found == pytest.approx(0.5 * 1 + 0.3 * 2 + 0.2 * 5, rel=1e-5)


def test_a_probability_ratio_that_overflows_is_the_cap() -> None:
    one = torch.ones(1, 1)
    found = importance_weights(logprobs=0 * one, behaviour_logprobs=-200 * one, mask=one > 0, cap=2.0)
    assert found.item() == 2.0
    with pytest.raises(ValueError, match="cap above 0"):
        importance_weights(logprobs=one, behaviour_logprobs=one, mask=one > 0, cap=0.0)

"""Rows of like length go through a model together: the cheapest cut, and every number where it belongs."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from rlhf_core.config import LoRAConfig
from rlhf_core.functional.logprobs import logprobs_from_logits
from rlhf_core.models.actor import response_logprobs
from rlhf_core.models.lora import attach_lora
from rlhf_core.models.token_tree import can_branch, has_form
from rlhf_core.training.micro_batches import (
    FEW_PASSES,
    MOST_TOKENS,
    PASS_TOKENS,
    PassCost,
    cost_on,
    cut,
    of_like_length,
    pieces,
)
from tests.tiny_llama import tiny_llama
from tests.unit.models.architectures import tiny_causal_lm
from tests.unit.ppo.experience import PROMPTS, RESPONSES, tiny_experience

LENGTHS = [7, 30, 8, 2, 31, 9, 30]


def cost(passes: list[list[int]], pass_tokens: int) -> int:
    return sum(len(places) * max(LENGTHS[place] for place in places) + pass_tokens for places in passes)


@pytest.mark.parametrize("most", [2, 3, 7])
@pytest.mark.parametrize("pass_tokens", [0, 5, 20, FEW_PASSES])
def test_no_other_cut_of_the_sorted_rows_costs_less(most: int, pass_tokens: int) -> None:
    found = of_like_length(LENGTHS, most, PassCost(pass_tokens))[::-1]  # the longest come first
    order = [place for places in found for place in places]
    assert order == [3, 0, 2, 5, 1, 6, 4]
    assert all(len(places) <= most for places in found)
    every = [
        [order[start:end] for start, end in zip((0, *inner), (*inner, len(order)), strict=True)]
        for number in range(len(order))
        for inner in combinations(range(1, len(order)), number)
    ]
    possible = [cost(each, pass_tokens) for each in every if all(len(places) <= most for places in each)]
    assert cost(found, pass_tokens) == min(possible)
    if pass_tokens == FEW_PASSES:
        assert len(found) == -(-len(LENGTHS) // most)


def test_rows_of_one_length_stay_in_their_order_and_no_rows_need_no_pass() -> None:
    assert sorted(of_like_length([5] * 7, 3, PassCost(PASS_TOKENS))) in (
        [[0, 1, 2], [3, 4, 5], [6]],
        [[0], [1, 2, 3], [4, 5, 6]],
    )
    assert of_like_length([5] * 7, 8, PassCost(PASS_TOKENS)) == [[0, 1, 2, 3, 4, 5, 6]]
    assert of_like_length([], 3, PassCost(PASS_TOKENS)) == []


def test_rows_of_one_prompt_go_together_where_what_they_have_in_common_costs_once() -> None:
    rows = [[*[1 + n % 2] * 40, *range(3, 7 + 9 * (n // 2))] for n in range(8)]
    assert sorted(map(sorted, cut(rows, 4, PassCost(PASS_TOKENS)))) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sorted(map(sorted, cut(rows, 4, PassCost(PASS_TOKENS, is_tree=True)))) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert len(cut(rows, 8, PassCost(PASS_TOKENS, is_tree=True))) == 1
    other = [[n, *range(9, 9 + length)] for n, length in enumerate([30, 900, 30, 900])]  # attention has padding
    assert sorted(map(sorted, cut(other, 4, PassCost(PASS_TOKENS, is_tree=True)))) == [[0, 2], [1, 3]]
    assert cut([], 4, PassCost(PASS_TOKENS, is_tree=True)) == []


def test_a_pass_of_several_rows_has_no_more_tokens_than_it_may() -> None:
    assert of_like_length([30, 7, 9, 50, 8], 5, PassCost(FEW_PASSES, most=40)) == [[3], [0], [1, 4, 2]]
    rows = [[*range(1, 21), n] for n in range(1, 9)]  # eight samples of a prompt of 20 tokens, in a pass of 24 distinct
    assert sorted(cut(rows, 8, PassCost(PASS_TOKENS, is_tree=True, most=24))) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(cut(rows, 8, PassCost(PASS_TOKENS, most=24))) == 8


def test_adapters_that_drop_are_scored_as_what_they_are_over_and_learnt_otherwise() -> None:
    plain, adapted = tiny_llama(), tiny_llama()
    attach_lora(adapted, LoRAConfig(r=2, dropout=0.1), seed=0)
    assert cost_on(torch.device("cpu"), adapted) == cost_on(torch.device("cpu"), plain)
    assert has_form(adapted)
    assert not can_branch(adapted)
    assert can_branch(plain)


def test_passes_are_few_on_a_gpu() -> None:
    assert cost_on(torch.device("cpu"), tiny_llama()) == PassCost(PASS_TOKENS, is_tree=True, most=MOST_TOKENS)
    assert cost_on(torch.device("cpu"), tiny_causal_lm("gpt2")) == PassCost(PASS_TOKENS, most=MOST_TOKENS)
    assert cost_on(torch.device("cuda"), tiny_llama()) == PassCost(FEW_PASSES)


@pytest.mark.parametrize("pass_tokens", [0, FEW_PASSES])
def test_a_piece_has_its_rows_tokens_and_no_column_of_padding(pass_tokens: int) -> None:
    batch = tiny_experience()
    found = pieces(batch.sequences, batch.attention_mask, batch.action_mask, most=3, cost=PassCost(pass_tokens))
    assert sorted(torch.cat([piece.rows for piece in found]).tolist()) == list(range(8))
    restored = torch.full_like(batch.values, -1.0)
    for piece in found:
        responses = [RESPONSES[row] for row in piece.rows]
        for row, ids, mask in zip(piece.rows, piece.sequences, piece.attention_mask, strict=True):
            assert ids[mask].tolist() == PROMPTS[row] + RESPONSES[row]
            assert bool(mask[-1])
        assert bool(piece.attention_mask.any(0).all())
        assert piece.num_actions == max(map(len, responses))
        taken = piece.take(batch.action_mask)
        assert taken.sum(1).tolist() == list(map(len, responses))
        piece.put(restored, piece.take(batch.values))
    assert torch.equal(restored[batch.action_mask], batch.values[batch.action_mask])


def test_a_response_without_tokens_and_a_row_of_one_token_are_read() -> None:
    sequences = torch.tensor([[0, 5, 0, 0], [0, 6, 0, 0]])
    none = torch.zeros(2, 2, dtype=torch.bool)
    (piece,) = pieces(sequences, sequences > 0, none, most=2, cost=PassCost(PASS_TOKENS))
    assert piece.sequences[:, -1].tolist() == [5, 6]
    assert piece.attention_mask.tolist() == [[False, True]] * 2
    assert (piece.num_actions, piece.take(torch.ones(2, 2)).tolist()) == (1, [[0.0], [0.0]])


def test_rows_in_pieces_have_the_log_probabilities_that_each_has_alone() -> None:
    model, batch = tiny_llama(initializer_range=0.2), tiny_experience()
    found = torch.zeros_like(batch.values)
    with torch.no_grad():
        for piece in pieces(batch.sequences, batch.attention_mask, batch.action_mask, most=8, cost=PassCost(0)):
            read = response_logprobs(
                model, sequences=piece.sequences, attention_mask=piece.attention_mask, num_actions=piece.num_actions,
                temperature=1.0,
            )  # fmt: skip
            piece.put(found, read)
        for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            logits = model(torch.tensor([prompt + response])).logits[:, len(prompt) - 1 : -1]
            alone = logprobs_from_logits(logits, torch.tensor([response]), temperature=1.0)[0]
            torch.testing.assert_close(found[row, : len(response)], alone, rtol=1e-5, atol=1e-5)


def test_what_counts_is_kept_though_nobody_attends_to_it_and_holes_stay() -> None:
    sequences = torch.tensor([[0, 5, 6, 7, 2, 0], [4, 3, 8, 9, 1, 2]])
    attended = torch.tensor([[0, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()  # coati masks a stop token that pads, too
    counted = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    (piece,) = pieces(sequences, attended, counted, most=2, cost=PassCost(FEW_PASSES))
    assert piece.sequences[piece.rows.tolist().index(0)].tolist()[-4:] == [5, 6, 7, 2]
    assert piece.take(counted).sum() == counted.sum()
    assert piece.take(torch.where(counted, 1.0, float("nan"))).nansum() == counted.sum()

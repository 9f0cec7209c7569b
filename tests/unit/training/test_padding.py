"""Padding of token ids."""

from __future__ import annotations

import torch

from rlhf_core.training.padding import pad_examples, pad_right

CPU = torch.device("cpu")


def test_whole_sequences_are_padded_on_the_right() -> None:
    ids, mask = pad_right([[1, 2, 3], [4]], CPU)
    assert ids.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert mask.tolist() == [[True, True, True], [True, False, False]]


def test_prompts_are_padded_left_and_responses_right() -> None:
    batch = pad_examples([([1, 2], [3]), ([4], [5, 6])], CPU)
    assert batch.sequences.tolist() == [[1, 2, 3, 0], [0, 4, 5, 6]]
    assert batch.attention_mask.tolist() == [[True, True, True, False], [False, True, True, True]]
    assert batch.action_mask.tolist() == [[True, False], [True, True]]

"""Rows of token ids as one batch: padded on the right, or prompts padded on the left and responses on the right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TokenIds = Sequence[int]


class PaddedBatch(NamedTuple):
    """Prompts padded left, responses right."""

    sequences: Tensor
    """[B S]"""
    attention_mask: Tensor
    """[B S], True on tokens."""
    action_mask: Tensor
    """[B A], True on response tokens."""


def pad_right(rows: Sequence[TokenIds], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids and mask of whole sequences, [B S] each, padded on the right with zeros."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, torch.arange(width, device=device) < lengths[:, None]


def pad_examples(examples: Sequence[tuple[TokenIds, TokenIds]], device: torch.device) -> PaddedBatch:
    """Return prompts and responses as one batch, prompts padded left and responses right, with zeros."""
    width = max(len(prompt) for prompt, _ in examples)
    left = [(0,) * (width - len(prompt)) for prompt, _ in examples]
    ids, mask = pad_right(
        [[*pad, *prompt, *response] for pad, (prompt, response) in zip(left, examples, strict=True)], device
    )
    places = torch.arange(ids.shape[1], device=device)
    starts = torch.tensor([len(pad) for pad in left], device=device)
    return PaddedBatch(ids, mask & (places >= starts[:, None]), mask[:, width:])

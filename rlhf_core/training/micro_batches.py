"""Which rows go through a model together, so that little of what it computes is padding.

Losses are sums over rows, and what is read of a row does not depend on its company, but for last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PASS_TOKENS = 64
"""What a pass through a model costs on a CPU beside its tokens, in tokens."""
FEW_PASSES = 1 << 40
"""In the place of `PASS_TOKENS`: not one pass more than has to be."""


def pass_tokens_on(device: torch.device) -> int:
    """Return what a pass costs on a device: a GPU would wait for the next one for longer than padding takes it."""
    return PASS_TOKENS if device.type == "cpu" else FEW_PASSES


def of_like_length(lengths: Sequence[int], most: int, pass_tokens: int) -> list[list[int]]:
    """Return the places of rows that go through a model together, padded to the longest of them.

    Rows are sorted by length, those of one length in their order. Of all cuts this one has the least cost.

    Args:
        lengths: tokens of each row.
        most: rows of a pass, at most.
        pass_tokens: cost of a pass beside that of its tokens, padding included.

    Example:
        >>> of_like_length([9, 2, 9, 3], 4, pass_tokens=8)
        [[1, 3], [0, 2]]
    """
    order = sorted(range(len(lengths)), key=lambda place: lengths[place])
    least: list[tuple[int, int]] = [(0, 0)]  # for the first rows in that order: their cost, and where the last cut is
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        least.append(
            min(
                (least[start][0] + (end - start) * longest + pass_tokens, start)
                for start in range(max(0, end - most), end)
            )
        )
    found: list[list[int]] = []
    end = len(order)
    while end:
        start = least[end][1]
        found.insert(0, order[start:end])
        end = start
    return found


class Piece(NamedTuple):
    """Rows of a padded batch that go through a model together, moved so that all end in the last column."""

    rows: Tensor
    """[b], their places in the batch."""
    sequences: Tensor
    """[b s]"""
    attention_mask: Tensor
    """[b s], True on tokens."""
    columns: Tensor
    """[b a], which column of the batch's responses stands here; below 0 where the response is shorter."""

    @property
    def num_actions(self) -> int:
        """Width of the response part."""
        return self.columns.shape[1]

    def take(self, numbers: Tensor) -> Tensor:
        """Return these rows of a tensor of one number for each response token, [B A], as [b a]."""
        return numbers[self.rows].gather(1, self.columns.clamp(min=0)).masked_fill(self.columns < 0, 0)

    def put(self, numbers: Tensor, found: Tensor) -> None:
        """Write what was found for these rows, [b a], to where it belongs in [B A]."""
        is_there = self.columns >= 0
        rows = self.rows[:, None].expand_as(self.columns)
        numbers[rows[is_there], self.columns[is_there]] = found[is_there]


def pieces(sequences: Tensor, attention_mask: Tensor, num_actions: int, *, most: int, pass_tokens: int) -> list[Piece]:
    """Return a batch cut by `of_like_length`: no column of a piece is padding alone.

    Args:
        sequences: [B S], prompts padded left, responses right.
        attention_mask: [B S], True on tokens.
        num_actions: width of the response part.
        most: as for `of_like_length`.
        pass_tokens: as for `of_like_length`.
    """
    width = sequences.shape[1]
    attended = attention_mask.long()
    begins, after = attended.argmax(dim=1), attended.flip(1).argmax(dim=1)  # padding before and after each row
    found = []
    for places in of_like_length((width - begins - after).tolist(), most, pass_tokens):
        rows = torch.tensor(places, device=sequences.device)
        shift = after[rows, None]
        actions = max(1, num_actions - int(shift.min()))
        length = max(actions + 1, width - int((begins + after)[rows].min()))
        source = torch.arange(width - length, width, device=sequences.device) - shift
        there = source.clamp(min=0)
        columns = torch.arange(num_actions - actions, num_actions, device=sequences.device) - shift
        found.append(
            Piece(
                rows,
                sequences[rows].gather(1, there),
                attention_mask[rows].gather(1, there) & (source >= 0),
                columns.clamp(min=-1),
            )
        )
    return found

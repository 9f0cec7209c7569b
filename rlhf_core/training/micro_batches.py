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
LIKE_LENGTH = "of like length"
"""How rows are cut, in a training state."""
FEW_PASSES = 1 << 40
"""In the place of `PASS_TOKENS`: not one pass more than has to be."""


def pass_tokens_on(device: torch.device) -> int:
    """Return what a pass costs on a device: a GPU would wait for the next one for longer than padding takes it."""
    return PASS_TOKENS if device.type == "cpu" else FEW_PASSES


def of_like_length(lengths: Sequence[int], most: int, pass_tokens: int) -> list[list[int]]:
    """Return the places of rows that go through a model together, padded to the longest of them; the longest first.

    Rows are sorted by length, those of one length in their order. Of all cuts this one has the least cost.

    Args:
        lengths: tokens of each row.
        most: rows of a pass, at most.
        pass_tokens: cost of a pass beside that of its tokens, padding included.

    Example:
        >>> of_like_length([9, 2, 9, 3], 4, pass_tokens=8)
        [[0, 2], [1, 3]]
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
        found.append(order[start:end])
        end = start
    return found


class Piece(NamedTuple):
    """Rows of a padded batch that go through a model together, moved so that all end in the last column."""

    rows: Tensor
    """[b], their places in the batch; in host memory."""
    sequences: Tensor
    """[b s]"""
    attention_mask: Tensor
    """[b s], True on tokens."""
    columns: Tensor
    """[b a], which column of the responses stands here, below 0 where one is shorter; in host memory."""

    @property
    def num_actions(self) -> int:
        """Width of the response part."""
        return self.columns.shape[1]

    def take(self, numbers: Tensor) -> Tensor:
        """Return these rows of a tensor of one number for each response token, [B A], as [b a]."""
        columns = self.columns.to(numbers.device)
        return numbers[self.rows.to(numbers.device)].gather(1, columns.clamp(min=0)).masked_fill(columns < 0, 0)

    def put(self, numbers: Tensor, found: Tensor) -> None:
        """Write what was found for these rows, [b a], to where it belongs in [B A]."""
        own = (self.columns >= 0).nonzero(as_tuple=True)  # in host memory: a GPU is not waited for
        place = (self.rows[own[0]], self.columns[own])
        source, target = ([index.to(found.device) for index in each] for each in (own, place))
        numbers[tuple(target)] = found[tuple(source)].to(numbers.dtype)


def in_order(sequences: Tensor, attention_mask: Tensor, num_actions: int, size: int) -> list[Piece]:
    """Return a batch as releases before 0.3 cut it: in its order, with all padding; a run of theirs ends so.

    Dropout is drawn for places in a micro-batch: cut in another way, such a run would learn something else.
    """
    return [
        Piece(rows, sequences[here], attention_mask[here], torch.arange(num_actions).expand(len(rows), -1))
        for rows in torch.split(torch.arange(len(sequences)), size)
        for here in [rows.to(sequences.device)]
        if len(rows)
    ]


def pieces(
    sequences: Tensor, attention_mask: Tensor, action_mask: Tensor, *, most: int, pass_tokens: int
) -> list[Piece]:
    """Return a batch cut by `of_like_length`, each piece as wide as its longest row, but two columns at least.

    Args:
        sequences: [B S], prompts padded left, responses right.
        attention_mask: [B S], True on tokens.
        action_mask: [B A], True on response tokens; what counts is kept, though nobody attends to it.
        most: as for `of_like_length`.
        pass_tokens: as for `of_like_length`.
    """
    width, most_actions = sequences.shape[1], action_mask.shape[1]
    used = attention_mask.cpu()
    used = torch.cat([used[:, :-most_actions], used[:, -most_actions:] | action_mask.cpu()], dim=1).long()
    begins, after = used.argmax(dim=1), used.flip(1).argmax(dim=1)  # padding before and after each row
    found = []
    for places in of_like_length((width - begins - after).tolist(), most, pass_tokens):
        rows = torch.tensor(places)
        shift = after[rows, None]
        actions = max(1, most_actions - int(shift.min()))
        length = max(actions + 1, width - int((begins + after)[rows].min()))
        source = torch.arange(width - length, width) - shift
        columns = torch.arange(most_actions - actions, most_actions) - shift
        here, there = (each.to(sequences.device) for each in (rows, source))
        there, is_there = there.clamp(min=0), there >= 0
        found.append(
            Piece(
                rows,
                sequences[here].gather(1, there),
                attention_mask[here].gather(1, there) & is_there,
                columns.clamp(min=-1),
            )
        )
    return found

"""Which rows go through a model together, so that little of what it computes is padding.

Losses are sums over rows, and what is read of a row does not depend on its company, but for last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_core.models.shape import MOST_TOKENS, NO_LIMIT
from rlhf_core.models.token_tree import common_length, has_form
from rlhf_core.training.padding import TokenIds

PASS_TOKENS = 64
"""What a pass through a model costs on a CPU beside its tokens, in tokens."""
IN_SHORT_PASSES = "of like length, as a tree, in short passes"
"""How rows are cut and computed, in a training state."""
AS_TREE = "of like length, as a tree"
"""As it was in release 0.3, in passes of any number of tokens."""
FEW_PASSES = 1 << 40
"""In the place of `PASS_TOKENS`: not one pass more than has to be."""
_ATTENTION_DIVISOR = 4000
"""Attention costs a row of n tokens as much as n^2 over this tokens, in a model 600 wide; in wider ones less."""


class PassCost(NamedTuple):
    """What passes through a model cost."""

    tokens: int
    """Of one beside its tokens, in tokens."""
    is_tree: bool = False
    """Whether what rows begin with in common costs once, and padding nothing (`models/token_tree.py`)."""
    most: int = NO_LIMIT
    """Tokens of one that has several rows."""


def cost_on(device: torch.device, model: Any) -> PassCost:
    """Return what passes cost on a device: a GPU would wait for the next one for longer than padding takes it."""
    return PassCost(PASS_TOKENS, has_form(model), MOST_TOKENS) if device.type == "cpu" else PassCost(FEW_PASSES)


def cut(rows: Sequence[TokenIds], most: int, cost: PassCost) -> list[list[int]]:
    """Return the places of rows that go through a model together: of like length, or of like beginning if that is less.

    Args:
        rows: tokens of each.
        most: rows of a pass, at most.
        cost: of passes.
    """
    by_length = of_like_length([len(row) for row in rows], most, cost)
    if not cost.is_tree:
        return by_length
    order = sorted(range(len(rows)), key=lambda place: list(rows[place]))
    common = [0, *(common_length(rows[one], rows[other]) for one, other in pairwise(order))]
    own = [0, *accumulate(len(rows[place]) - shared for place, shared in zip(order, common, strict=False))]
    by_beginning = _cheapest(order, most, lambda start, end: common[start] + own[end] - own[start], cost)

    def cost_of(passes: list[list[int]]) -> float:
        return sum(cost.tokens + _tree_tokens([rows[place] for place in places]) for places in passes)

    return min(by_length, by_beginning, key=cost_of)


def of_like_length(lengths: Sequence[int], most: int, cost: PassCost) -> list[list[int]]:
    """Return the places of rows that go through a model together, padded to the longest of them; the longest first.

    Rows are sorted by length, those of one length in their order. Of all cuts this one has the least cost.

    Args:
        lengths: tokens of each row.
        most: rows of a pass, at most.
        cost: of passes, whose padding costs, too.

    Example:
        >>> of_like_length([9, 2, 9, 3], 4, PassCost(8))
        [[0, 2], [1, 3]]
    """
    order = sorted(range(len(lengths)), key=lambda place: lengths[place])
    return _cheapest(order, most, lambda start, end: (end - start) * lengths[order[end - 1]], cost)


def _cheapest(order: list[int], most: int, tokens: Callable[[int, int], int], cost: PassCost) -> list[list[int]]:
    """Return neighbours together, the last first, so that the sum of costs is least.

    Args:
        order: what is cut.
        most: rows of one part.
        tokens: of the rows from a place in the order up to another, as they are computed.
        cost: of a part.
    """
    least: list[tuple[int, int]] = [(0, 0)]  # of the first ones: what they cost, and where the last cut is
    for end in range(1, len(order) + 1):
        possible = [
            (least[start][0] + its + cost.tokens, start)
            for start in range(max(0, end - most), end)
            if (its := tokens(start, end)) <= cost.most or start == end - 1
        ]
        least.append(min(possible))
    found: list[list[int]] = []
    end = len(order)
    while end:
        start = least[end][1]
        found.append(order[start:end])
        end = start
    return found


def _tree_tokens(rows: Sequence[TokenIds]) -> float:
    """Return what rows cost as one tree, in tokens, with attention as if all were as long as the longest."""
    common = sum(common_length(one, other) for one, other in pairwise(sorted(map(list, rows))))
    return sum(map(len, rows)) - common + len(rows) * max(map(len, rows)) ** 2 / _ATTENTION_DIVISOR


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


def pieces(sequences: Tensor, attention_mask: Tensor, action_mask: Tensor, *, most: int, cost: PassCost) -> list[Piece]:
    """Return a batch cut by `cut`, each piece as wide as its longest row, but two columns at least.

    Args:
        sequences: [B S], prompts padded left, responses right.
        attention_mask: [B S], True on tokens.
        action_mask: [B A], True on response tokens; what counts is kept, though nobody attends to it.
        most: as for `cut`.
        cost: as for `cut`.
    """
    width, most_actions = sequences.shape[1], action_mask.shape[1]
    used = attention_mask.cpu()
    used = torch.cat([used[:, :-most_actions], used[:, -most_actions:] | action_mask.cpu()], dim=1).long()
    begins, after = used.argmax(dim=1), used.flip(1).argmax(dim=1)  # padding before and after each row
    ids, ends = sequences.tolist(), (width - after).tolist()
    tokens = [ids[row][begin : ends[row]] for row, begin in enumerate(begins.tolist())]
    found = []
    for places in cut(tokens, most, cost):
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

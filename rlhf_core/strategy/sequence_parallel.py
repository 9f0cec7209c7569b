"""The tokens of every row in parts: between attention and attention, a process has some columns of a batch alone.

Nothing there looks from one token to another. For attention they meet again: each process gets all tokens of some
heads, and gives back its own tokens of all (all_to_all: Jacobs et al. 2023, arXiv:2309.14509). Or, where matrices are
in parts, their sums come in parts of rows, which are put together for the next matrices (split_gather: Korthikanti et
al. 2022, arXiv:2205.05198). In between, rows are padded to a multiple of the processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rlhf_core.strategy.ranks import Ranks


class Columns:
    """This process's columns of a batch.

    Args:
        ranks: those that have the others, in order; one has all.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.width = 0
        """Of the batch that a layer attends in at present, all columns together."""

    def of(self, whole: Tensor) -> Tensor:
        """Return this process's of all columns, [B S ...], padding behind the last."""
        each = -(-whole.shape[1] // self.ranks.world_size)
        padded = _padded(whole, each * self.ranks.world_size)
        return padded.narrow(1, self.ranks.rank * each, each)

    def among_zeros(self, own: Tensor, width: int) -> Tensor:
        """Return this process's columns where they are in the batch, [B S H], and zeros elsewhere."""
        each = own.shape[1]
        before, after = self.ranks.rank * each, (self.ranks.world_size - 1 - self.ranks.rank) * each
        return pad(own, (0, 0, before, after))[:, :width]

    def together(self, own: Tensor, width: int) -> Tensor:
        """Return the columns of all processes, [B S ...], without a graph."""
        return self.ranks.stack(own).transpose(0, 1).flatten(1, 2)[:, :width]

    def sum_of(self, parts: Tensor) -> Tensor:
        """Return this process's columns of the sum over processes, without a graph."""
        each = -(-parts.shape[1] // self.ranks.world_size)
        padded = _padded(parts, each * self.ranks.world_size)
        return self.ranks.sum_to_each(padded.reshape(len(parts), self.ranks.world_size, each, -1).movedim(1, 0))

    def put_together(self, own: Tensor) -> Tensor:
        """Return the columns of all processes; back, this process's columns of the sum of all gradients."""
        return _put_together(own, self, self.width)

    def summed(self, parts: Tensor) -> Tensor:
        """Return this process's columns of the sum over processes, [B S H]; back, the gradients of all columns."""
        return _summed(parts, self)

    def by_heads(self, own: Tensor) -> Tensor:
        """Return all tokens of this process's heads, [B H/n S D], from its tokens of all heads, [B H s D]."""
        number, (rows, heads, each, size) = self.ranks.world_size, own.shape
        sent = own.reshape(rows, number, heads // number, each, size).movedim(1, 0)
        return _exchange(sent, self.ranks).movedim(0, 2).flatten(2, 3)[:, :, : self.width]

    def by_tokens(self, attended: Tensor) -> Tensor:
        """Return this process's tokens of all heads, [B s H D], from all tokens of its heads, [B S H/n D]."""
        number, each = self.ranks.world_size, -(-self.width // self.ranks.world_size)
        padded = _padded(attended, number * each)
        sent = padded.reshape(len(padded), number, each, *padded.shape[2:]).movedim(1, 0)
        return _exchange(sent, self.ranks).movedim(0, 2).flatten(2, 3)

    def cut(self, layers: list[Any], *, by_heads: bool) -> None:
        """Have layers work on this process's columns; the first is given all of them.

        Args:
            layers: of a decoder, those of this process.
            by_heads: whether attention exchanges heads for tokens; else it is given all tokens.
        """

        def attend(_: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            angles = options["position_embeddings"]
            self.width = angles[0].shape[1]
            if by_heads:
                options = options | {"position_embeddings": tuple(map(self.of, angles)), "columns": self}
            return given, options

        layers[0].register_forward_pre_hook(lambda _, given: (self.of(given[0]), *given[1:]))
        for each in layers:  # not the layer's own hooks: these are not called where it is computed again
            each.self_attn.register_forward_pre_hook(attend, with_kwargs=True)


def _padded(whole: Tensor, width: int) -> Tensor:
    """Return a batch with columns of zeros behind the last."""
    return pad(whole, (0, 0) * (whole.ndim - 2) + (0, width - whole.shape[1]))


class _PutTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, columns: Columns, width: int) -> Tensor:
        ctx.columns = columns
        return columns.together(own, width)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.columns.sum_of(gradients[0]), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, columns: Columns) -> Tensor:
        ctx.columns, ctx.width = columns, parts.shape[1]
        return columns.sum_of(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.columns.together(gradients[0], ctx.width), None


class _Exchange(torch.autograd.Function):
    """To each process its tensor, [processes ...], and from each one; back, the same."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.exchange(sent)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.exchange(gradients[0]), None


_put_together: Callable[[Tensor, Columns, int], Tensor] = _PutTogether.apply
_summed: Callable[[Tensor, Columns], Tensor] = _Summed.apply
_exchange: Callable[[Tensor, Ranks], Tensor] = _Exchange.apply

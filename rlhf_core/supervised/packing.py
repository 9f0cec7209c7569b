"""Several demonstrations in one row, so that little of it is padding; none of them sees another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlhf_core.errors import ConfigError
from rlhf_core.models.trunk import device_of, evaluating
from rlhf_core.supervised.batches import MaskedTokens, TokenBatch, token_batch
from rlhf_core.supervised.step import kept_logits


def pack_rows(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Return the sequences of each row: first fit, longest first.

    Every sequence goes, whole, into the first row that has room for it; equal lengths keep their order, so the result
    depends on the lengths alone. First fit by decreasing length needs at most 11/9 of the fewest possible rows, plus
    6/9 of a row (Dosa 2007).

    Args:
        lengths: tokens of each sequence, at least 1.
        capacity: tokens of a row.

    Returns:
        Places in `lengths`, by row, in the order in which they stand in it.

    Raises:
        ValueError: if a sequence is longer than a row.

    Example:
        >>> pack_rows([3, 6, 4, 4], capacity=10)
        [[1, 2], [3, 0]]
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[place]
        if not 0 < length <= capacity:
            raise ValueError(f"expected sequences of 1 to {capacity} tokens, got one of {length}")
        row = next((number for number, free in enumerate(room) if free >= length), None)
        if row is None:
            rows.append([])
            room.append(capacity)
            row = len(rows) - 1
        rows[row].append(place)
        room[row] -= length
    return rows


SHORT = 7
"""Tokens of the probe's second sequence."""
_LAST = 4  # positions compared at the end of each sequence: the last one has read most
_TOLERANCE = {torch.float32: 2e-4}
_COARSE_TOLERANCE = 3e-2  # of numbers of 16 bits


def packed_batches(rows: Sequence[MaskedTokens], *, capacity: int, size: int) -> list[TokenBatch]:
    """Return demonstrations packed into rows of at most `capacity` tokens, `size` rows to a batch.

    Args:
        rows: none longer than `capacity`.
        capacity: tokens of a row.
        size: rows that go through the model at once.
    """
    packed = [
        [rows[place] for place in places] for places in pack_rows([len(row.ids) for row in rows], capacity=capacity)
    ]
    return [_packed(packed[start : start + size]) for start in range(0, len(packed), size)]


def _packed(rows: Sequence[Sequence[MaskedTokens]]) -> TokenBatch:
    """Return rows of sequences as one batch: positions restart, and the mask is block-diagonal and causal."""
    width = max(sum(len(piece.ids) for piece in row) for row in rows)
    ids, places, learnt = (torch.zeros(len(rows), width, dtype=kind) for kind in (torch.long, torch.long, torch.bool))
    owner = torch.full((len(rows), width), -1)  # which sequence a token is of; padding is a sequence of its own,
    for number, row in enumerate(rows):  # so that no token sees nothing, which softmax would make NaN
        start = 0
        for piece_number, piece in enumerate(row):
            span = slice(start, start + len(piece.ids))
            ids[number, span] = torch.tensor(piece.ids)
            places[number, span] = torch.arange(len(piece.ids))
            learnt[number, span] = torch.tensor(piece.loss_mask, dtype=torch.bool)
            owner[number, span] = piece_number
            start = span.stop
    same = owner[:, :, None] == owner[:, None, :]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    return TokenBatch(ids, (same & causal)[:, None], places, learnt & (places > 0))


def check_packing(model: nn.Module, *, longest: int, vocabulary: int) -> None:
    """See that this model gives packed sequences the logits that each has alone.

    One row of two sequences of random tokens goes through the model beside each of the two alone. Alibi that counts
    along the row, a sliding window shorter than the longest sequence, or attention that ignores the mask is found so,
    whatever the architecture is called.

    Args:
        model: a causal language model on its device; comes out in the mode in which it was.
        longest: tokens of the longest sequence that will be packed.
        vocabulary: number of token ids.

    Raises:
        ConfigError: if the logits differ by more than rounding, or the model does not take such a mask.
    """
    generator = torch.Generator().manual_seed(0)
    pieces = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in (longest, SHORT)]
    rows = [MaskedTokens(piece, [False] * len(piece)) for piece in pieces]
    try:
        with evaluating(model):
            packed = _logits(model, _packed([rows]), [longest, longest + SHORT])
            alone = torch.cat([_logits(model, token_batch([row]), [len(row.ids)]) for row in rows])
    except Exception as error:  # whatever an architecture raises when it is given a mask that it does not know
        raise _cannot_pack(model, f"it does not take their mask: {type(error).__name__}") from error
    difference = ((packed - alone).abs().max() / alone.abs().max()).item()
    if not difference <= _TOLERANCE.get(next(model.parameters()).dtype, _COARSE_TOLERANCE):
        raise _cannot_pack(model, f"their logits differ by {difference:.2g} of the largest from those of each alone")


@torch.no_grad()
def _logits(model: nn.Module, batch: TokenBatch, ends: Sequence[int]) -> Tensor:
    """Return the logits of the last positions before each end, in the batch's one row."""
    device = device_of(model)
    kept = torch.tensor([place for end in ends for place in range(max(end - _LAST, 0), end)])
    return kept_logits(model, batch, kept, device)[0].float()


def _cannot_pack(model: nn.Module, why: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} cannot keep packed demonstrations apart, as {why}; alibi and sliding windows do "
        "this: set sft.packing to false"
    )

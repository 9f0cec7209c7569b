"""The head over some positions at a time, where all logits of a pass would be more than `LOGITS_BYTES`.

In the backward pass the logits of those positions are computed again. An architecture that changes what its head
returns (Gemma 2 squashes it) has all its logits at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlhf_core.models.shape import LOGITS_BYTES
from rlhf_core.models.trunk import unwrapped

_SLICES = 4
"""As many are at once what `LOGITS_BYTES` are: with its gradient, a slice needs more than its logits."""
_changing: set[type] = set()
"""Architectures that change what their head returns."""


def read_logits(
    model: Any, forward: Callable[[], Tensor], tokens: Tensor, read: Callable[[Tensor, Tensor], Sequence[Tensor]]
) -> Sequence[Tensor]:
    """Return what is read from the logits that predict tokens: a few numbers of each.

    Whether and where the positions are cut depends on the number of tokens and words alone.

    Args:
        model: a causal language model, maybe wrapped.
        forward: its pass, which returns the logits of the positions that predict the tokens, [B A V].
        tokens: [B A].
        read: returns tensors of one number a token, all of one dtype, from logits [B a V] and tokens [B a].
    """
    inner = unwrapped(model)
    row_bytes = 4 * len(tokens) * inner.config.get_text_config().vocab_size
    if row_bytes * tokens.shape[1] <= LOGITS_BYTES or type(inner) in _changing:
        return read(forward(), tokens)
    head = inner.get_output_embeddings()
    whole, size = head.forward, max(1, LOGITS_BYTES // _SLICES // row_bytes)
    found: list[Tensor] = []

    def part(hidden: Tensor, wanted: Tensor) -> Tensor:
        return torch.stack(tuple(read(whole(hidden), wanted)), dim=-1)

    def sliced(hidden: Tensor) -> Tensor:
        if hidden.shape[:2] != tokens.shape:  # an architecture that computes the logits of all positions
            every: Tensor = whole(hidden)
            return every
        parts = zip(torch.split(hidden, size, dim=1), torch.split(tokens, size, dim=1), strict=True)
        if torch.is_grad_enabled():
            read_parts = [checkpoint(part, *each, use_reentrant=False, preserve_rng_state=False) for each in parts]
        else:
            read_parts = [part(*each) for each in parts]
        found.append(torch.cat(read_parts, dim=1))
        return found[0]

    head.forward = sliced
    try:
        returned = forward()
    finally:
        del head.forward
    if not found:
        return read(returned, tokens)
    if returned.data_ptr() == found[0].data_ptr() or torch.equal(returned, found[0]):
        return returned.unbind(dim=-1)
    _changing.add(type(inner))
    return read(forward(), tokens)

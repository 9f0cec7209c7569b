"""The head over some positions at a time, where all logits of a pass would be more than `LOGITS_BYTES`.

In the backward pass the logits of those positions are computed again. An architecture that changes what its head
returns (Gemma 2 squashes it), or that cannot be tried without data (Mixtral), has all its logits at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlhf_core.models.shape import LOGITS_BYTES, head_is_last
from rlhf_core.models.trunk import unwrapped

_SLICES = 4
"""As many slices have `LOGITS_BYTES` together: with its gradient, one needs more than its logits."""


def read_logits(
    model: Any, forward: Callable[[], Tensor], tokens: Tensor, read: Callable[[Tensor, Tensor], Sequence[Tensor]]
) -> Sequence[Tensor]:
    """Return what is read from the logits that predict tokens: a few numbers of each.

    Where the positions are cut depends on the number of rows, tokens and words alone.

    Args:
        model: a causal language model, maybe wrapped.
        forward: its pass, which returns the logits of the positions that predict the tokens, [B A V].
        tokens: [B A].
        read: returns tensors of one number a token, all of one dtype, from logits [B a V] and tokens [B a].
    """
    inner = unwrapped(model)
    position_bytes = 4 * len(tokens) * inner.config.get_text_config().vocab_size
    if position_bytes * tokens.shape[1] <= LOGITS_BYTES or not head_is_last(inner.config):
        return read(forward(), tokens)
    head = inner.get_output_embeddings()
    whole, size = head.forward, max(1, LOGITS_BYTES // _SLICES // position_bytes)

    def part(hidden: Tensor, wanted: Tensor) -> Tensor:
        # A view's rows would be multiplied one by one on a CPU, with a copy of the weights for each.
        return torch.stack(tuple(read(whole(hidden.contiguous()), wanted)), dim=-1)

    def sliced(hidden: Tensor) -> Tensor:
        parts = zip(torch.split(hidden, size, dim=1), torch.split(tokens, size, dim=1), strict=True)
        if torch.is_grad_enabled():
            return torch.cat([checkpoint(part, *each, use_reentrant=False) for each in parts], dim=1)
        return torch.cat([part(*each) for each in parts], dim=1)

    others = vars(head).get("forward")  # of a library that wraps modules
    head.forward = sliced
    try:
        found = forward()  # what the head returned: [B A n]
    finally:
        if others is None:
            del head.forward
        else:
            head.forward = others
    return found.unbind(dim=-1)

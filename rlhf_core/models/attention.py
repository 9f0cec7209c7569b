"""Attention over short rows on a CPU, in 16 bits: plain products in place of PyTorch's fused kernel.

The kernel's backward pass takes the same time for each row and head, however short the row is: for 32 rows of 36 tokens
it took 42 ms a layer, where products took 3. Products write the scores out, which costs memory as rows grow, and gains
less. So the kernel has long rows, float32, single tokens (decoding), dropout, and every GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from rlhf_core.models.saving import quiet
from rlhf_core.models.shape import SHORT_ROW

_NAME, _KERNEL = "short_rows", "sdpa"
_HALVES = (torch.bfloat16, torch.float16)
_OTHER_FORMS = ("softcap", "position_bias", "s_aux")  # of scores, in some architectures


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return what each token attends to, [B S H D], as transformers asks an implementation of attention for it.

    Args:
        module: the layer.
        query: [B H S D].
        key: [B K S D]; H / K heads in a row share one.
        value: as `key`.
        attention_mask: [B 1 S S], True where a token is attended to; None if all before are.
        dropout: of the scores' shares.
        scaling: of the scores.
        options: others, which the kernel knows.
    """
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    length, size = query.shape[2:]
    if (
        query.device.type != "cpu"
        or dtype not in _HALVES
        or not 1 < length == key.shape[2] <= SHORT_ROW
        or dropout
        or not (attention_mask is None or (attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1))
        or options.get("is_causal") is False
        or any(options.get(name) is not None for name in _OTHER_FORMS)
    ):
        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return attended
    if attention_mask is None:
        attention_mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    rows, heads, shared = query.shape[0], query.shape[1], key.shape[1]
    grouped = query.to(dtype).reshape(rows, shared, -1, size)  # the tokens of all heads that share a key, as one row
    products = (grouped @ key.to(dtype).transpose(2, 3)).view(rows, shared, -1, length, length)
    scores = products.float() * (size**-0.5 if scaling is None else scaling)
    # not minus infinity: padding attends to nothing, and would become NaN
    scores = scores.masked_fill(~attention_mask[:, None], torch.finfo(torch.float32).min)
    shares = torch.softmax(scores, dim=-1).to(dtype)
    found = shares.view(rows, shared, -1, length) @ value.to(dtype)
    return found.view(rows, heads, length, -1).transpose(1, 2).contiguous(), None


def attend_to_short_rows(model: PreTrainedModel) -> None:
    """Have a model's layers attend as above, where transformers would have them use the kernel for all."""
    if model.config._attn_implementation == _KERNEL:
        with quiet():  # architectures that choose for themselves stay as they are, and transformers would say so
            model.set_attn_implementation(_NAME)


AttentionInterface.register(_NAME, attend)
AttentionMaskInterface.register(_NAME, sdpa_mask)

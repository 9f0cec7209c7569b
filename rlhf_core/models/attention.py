"""Attention over short rows on a CPU, in bfloat16: plain products in place of PyTorch's fused kernel.

The kernel's backward pass costs a token of a short row as much as one of a long row: for 32 rows of 36 tokens it took
41 ms a layer on one core, where products took 5; for 9 of 128, 31 and 11. Products write the scores out, which costs
memory as rows grow. So the kernel has long rows, other arithmetic, single tokens (decoding), dropout, and every GPU.

transformers is given this in the place of its `sdpa`, under that name: architectures compare the name. On GPUs the
library flash_attn may be asked for.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rlhf_core.errors import ModelError
from rlhf_core.models.shape import SHORT_ROW
from rlhf_core.models.trunk import unwrapped

_FLASH = "flash_attention_2"
_OTHER_FORMS = ("softcap", "position_bias", "s_aux")
"""Change the scores in some architectures; the kernel knows or refuses them."""


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

    A token that may attend to none, as padding, gets the mean of all; no other token may read it.

    Args:
        module: the layer.
        query: [B H S D].
        key: [B K S D]; H / K heads in a row share one.
        value: as `key`.
        attention_mask: [B 1 S S], True where a token is attended to; None if all before are, or all. Others are the
            kernel's.
        dropout: of the weights.
        scaling: of the scores.
        options: others, which the kernel knows; `token_tree`, where the tokens are those of a `TokenTree`, which then
            says who attends to whom; `columns`, where they are some of each row's tokens.
    """
    if (columns := options.pop("columns", None)) is not None:
        query, key, value = map(columns.by_heads, (query, key, value))
        found, _ = attend(module, query, key, value, attention_mask, dropout, scaling, **options)
        return columns.by_tokens(found), None
    if (tree := options.pop("token_tree", None)) is not None:  # the row's tokens are those of several rows
        queries, keys, values = (tree.in_groups(each[0].transpose(0, 1)) for each in (query, key, value))
        attended = []
        for group in zip(queries, keys, values, strict=True):
            q, k, v = (each.transpose(1, 2) for each in group)
            found, _ = attend(module, q, k, v, None, dropout, scaling, **options)
            attended.append(found)
        return tree.in_tree(attended)[None], None
    if not _is_ours(module, query, key, attention_mask, dropout, options):
        by_kernel: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return by_kernel
    (rows, heads, length, size), shared = query.shape, key.shape[1]
    if attention_mask is None:
        attention_mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    with torch.autocast("cpu", enabled=False):
        # In float32, as in the kernel: what all scores of a row share (Qwen2 has such biases) would hide differences.
        grouped = query.float().reshape(rows, shared, -1, size)  # all heads that share a key, as one row
        products = (grouped @ key.float().transpose(2, 3)).view(rows, shared, -1, length, length)
        scores = products * (size**-0.5 if scaling is None else scaling)
        # not minus infinity: padding would become NaN
        scores = scores.masked_fill(~attention_mask[:, None], torch.finfo(torch.float32).min)
        weights = torch.softmax(scores, dim=-1).bfloat16().view(rows, shared, -1, length)
        found = weights @ value.bfloat16()
    return found.view(rows, heads, length, -1).transpose(1, 2).contiguous(), None


def attend_by_flash(model: Any) -> None:
    """Have a model attend by the library flash_attn, in place.

    Raises:
        ModelError: if its architecture cannot, or the library is not for this machine.
    """
    inner = unwrapped(model)
    trunk, told = getattr(inner, "trunk", inner), "its architecture has no form for it"
    try:
        trunk.set_attn_implementation(_FLASH)
    except (ImportError, ValueError) as error:
        told = next(iter(str(error).strip().splitlines()), told)
    if trunk.config._attn_implementation != _FLASH:  # transformers only warns
        raise ModelError(f"{type(trunk).__name__} cannot attend by flash_attn ({told}); set flash_attention to false")


def flash_attention_lacks(device: torch.device) -> str | None:
    """Return what the library flash_attn needs and is not here, in words; None if nothing."""
    if device.type != "cuda":
        return "a GPU"
    return None if importlib.util.find_spec("flash_attn") else "the library flash_attn"


def _is_ours(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, dropout: float, options: dict[str, Any]
) -> bool:
    """Return whether products attend to these, and not the kernel."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    if query.device.type != "cpu" or dtype != torch.bfloat16 or dropout:
        return False
    if not 1 < query.shape[2] == key.shape[2] <= SHORT_ROW or any(
        options.get(each) is not None for each in _OTHER_FORMS
    ):
        return False
    if mask is None:
        is_causal = options.get("is_causal")
        return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    return mask.dtype == torch.bool and mask.shape[1] == 1


AttentionInterface.register("sdpa", attend)

"""What a language model says of the tokens to learn, wherever in their rows they stand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.errors import DataError
from rlhf_core.functional.logprobs import logprobs_from_logits
from rlhf_core.functional.losses import lm_loss
from rlhf_core.models.device import autocast
from rlhf_core.models.trunk import forward_takes, unwrapped
from rlhf_core.supervised.batches import TokenBatch


def token_loss(
    model: nn.Module, batch: TokenBatch, *, denominator: float, device: torch.device, autocast_dtype: torch.dtype
) -> Tensor:
    """Return the negative log-likelihood of the tokens to learn, over `denominator`.

    Args:
        model: a causal language model, maybe wrapped by a booster.
        batch: in host memory.
        denominator: tokens to learn in the minibatch of all ranks, over the number of ranks.
        device: of the model.
        autocast_dtype: arithmetic of the forward pass.
    """
    # The token at position t is predicted at t - 1; where no row learns anything, no logits are computed.
    kept = batch.loss_mask.any(dim=0).nonzero().squeeze(1) - 1
    with autocast(device, autocast_dtype):
        logits = kept_logits(model, batch, kept, device)
    tokens, mask = (tensor[:, kept + 1].to(device) for tensor in (batch.input_ids, batch.loss_mask))
    logprobs = logprobs_from_logits(logits, tokens, temperature=1.0)
    return lm_loss(logprobs=logprobs, mask=mask, denominator=denominator)


def kept_logits(model: nn.Module, batch: TokenBatch, kept: Tensor, device: torch.device) -> Tensor:
    """Return the logits at the positions `kept` of every row, [B K V]; the head is applied there only.

    Args:
        model: a causal language model, maybe wrapped by a booster.
        batch: in host memory.
        kept: [K], positions.
        device: of the model.
    """
    mask = batch.attention_mask.to(device)
    if mask.dim() == batch.input_ids.dim():
        mask = mask.long()
    elif getattr(unwrapped(model).config, "_attn_implementation", None) == "eager":  # adds it to the scores
        mask = torch.zeros(mask.shape, device=device).masked_fill(~mask, torch.finfo(torch.float32).min)
    inputs: dict[str, Any] = {"input_ids": batch.input_ids.to(device), "attention_mask": mask, "use_cache": False}
    if forward_takes(model, "position_ids"):
        inputs["position_ids"] = batch.position_ids.to(device)
    kept = kept.to(device)
    if not forward_takes(model, "logits_to_keep"):
        every: Tensor = model(**inputs).logits
        return every[:, kept]
    logits: Tensor = model(**inputs, logits_to_keep=kept).logits
    return logits


def check_vocabulary(ids: Tensor, size: int | None, *, what: str) -> None:
    """See that the model knows every token id; past its embedding, a GPU stops without a word.

    Args:
        ids: in host memory.
        size: rows of the model's embedding; None if they cannot be known.
        what: names the sequences in the error.

    Raises:
        DataError: if one is outside.
    """
    if size is None or not ids.numel():
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        raise DataError(
            f"{what} hold the token id {low if low < 0 else high}, but the model's vocabulary has {size} entries; "
            "encode them with this model's own tokenizer"
        )


def vocabulary_size(model: nn.Module) -> int | None:
    """Return the rows of the embedding of a language or reward model, wrapped or not; None if it does not say."""
    inner: Any = unwrapped(model)
    inner = getattr(inner, "trunk", inner)
    embedding: Any = inner.get_input_embeddings() if hasattr(inner, "get_input_embeddings") else None
    if isinstance(embedding, nn.Embedding):
        return embedding.num_embeddings  # its weight may be sharded, and have no rows here
    return int(embedding.weight.shape[0]) if isinstance(getattr(embedding, "weight", None), Tensor) else None

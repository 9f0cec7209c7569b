"""The actor is a plain causal language model; here is how its response tokens are scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.functional.logprobs import LogprobsAndEntropy, logprobs_and_entropy, logprobs_from_logits
from rlhf_core.models.head_slices import read_logits
from rlhf_core.models.token_tree import read_columns, tree_of
from rlhf_core.models.trunk import forward_takes, model_inputs, vocabulary_part


def response_logits(model: PreTrainedModel, *, sequences: Tensor, attention_mask: Tensor, num_actions: int) -> Tensor:
    """Return the logits that predict each response token, [B A V]; of a model in parts, of this part's words.

    The head is applied at these positions only: over a vocabulary of 49152 words, the prompt's logits would
    cost more than the layers below.

    Args:
        model: a causal language model.
        sequences: [B S], prompts padded left, responses right.
        attention_mask: [B S], True on tokens.
        num_actions: width of the response part, A; below S, as the first token has nothing before it.
    """
    length = sequences.shape[1]
    # The token at position t is predicted at t - 1.
    positions = torch.arange(length - num_actions - 1, length - 1, device=sequences.device)
    inputs = model_inputs(model, sequences, attention_mask)
    if not forward_takes(model, "logits_to_keep"):
        every: Tensor = model(**inputs).logits
        return every[:, positions]
    logits: Tensor = model(**inputs, logits_to_keep=positions).logits
    return logits


def response_logprobs(
    model: PreTrainedModel, *, sequences: Tensor, attention_mask: Tensor, num_actions: int, temperature: float
) -> Tensor:
    """Return the log-probability of each response token in float32, [B A]; meaningless on padding."""
    rows = {"sequences": sequences, "attention_mask": attention_mask, "num_actions": num_actions}
    part = vocabulary_part(model)
    (found,) = _read(
        model, rows, lambda logits, tokens: (logprobs_from_logits(logits, tokens, temperature=temperature, part=part),)
    )
    return found


def response_statistics(
    model: PreTrainedModel,
    *,
    sequences: Tensor,
    attention_mask: Tensor,
    num_actions: int,
    temperature: float,
    entropy_needs_grad: bool,
) -> LogprobsAndEntropy:
    """Return `response_logprobs`, to the bit, and the entropy of the distribution that each token comes from."""
    rows = {"sequences": sequences, "attention_mask": attention_mask, "num_actions": num_actions}
    read = partial(
        logprobs_and_entropy, temperature=temperature, entropy_needs_grad=entropy_needs_grad,
        part=vocabulary_part(model),
    )  # fmt: skip
    return LogprobsAndEntropy(*_read(model, rows, read))


def _read(
    model: PreTrainedModel, rows: dict[str, Any], read: Callable[[Tensor, Tensor], Sequence[Tensor]]
) -> Sequence[Tensor]:
    sequences, actions = rows["sequences"], rows["num_actions"]
    tokens, length = sequences[:, -actions:], sequences.shape[1]
    if (tree := tree_of(model, sequences, rows["attention_mask"])) is not None:
        return read_columns(model, tree, torch.arange(length - actions - 1, length - 1), tokens, read)
    return read_logits(model, partial(response_logits, model, **rows), tokens, read)

"""A transformer without its language-model head, whatever its architecture."""

from __future__ import annotations

import copy

from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.errors import ModelError


def trunk_of(causal_lm: PreTrainedModel) -> PreTrainedModel:
    """Return the transformer inside a causal language model, not copied.

    Raises:
        ModelError: if the architecture does not say which part that is.
    """
    trunk = causal_lm.base_model
    if trunk is causal_lm:
        raise ModelError(
            f"expected a causal language model with a transformer under `{causal_lm.base_model_prefix}`, "
            f"got {type(causal_lm).__name__}, which has none"
        )
    return trunk


def copy_trunk(causal_lm: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the transformer inside a causal language model; the model stays apart from it."""
    return copy.deepcopy(trunk_of(causal_lm))


def position_ids(attention_mask: Tensor) -> Tensor:
    """Return each token's place among the attended ones, from 0, so that left padding shifts nothing.

    Args:
        attention_mask: [B S], True on tokens; padding gets 0 or the place before it.
    """
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def hidden_states(trunk: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the trunk's last hidden state, [B S H]."""
    output = trunk(
        input_ids=input_ids,
        attention_mask=attention_mask.long(),
        position_ids=position_ids(attention_mask),
        use_cache=False,
    )
    hidden: Tensor = output.last_hidden_state
    return hidden

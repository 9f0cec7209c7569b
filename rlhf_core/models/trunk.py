"""What is asked of any transformer, whatever its architecture: its inputs, device, arithmetic, mode and dropout.

Its trunk is the transformer without its language-model head.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from rlhf_core.errors import ModelError
from rlhf_core.functional.logprobs import VocabularyPart

_BY_ATTRIBUTE = ("dropout", "layerdrop")  # parts of the names under which architectures keep a probability


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


def unwrapped(model: Any) -> Any:
    """Return the model of transformers inside what a booster, PyTorch's data parallelism or peft put around it."""
    while not isinstance(model, PreTrainedModel):
        inner = getattr(model, "module", None)
        if inner is None and hasattr(model, "get_base_model"):
            inner = model.get_base_model()
        if not isinstance(inner, nn.Module):
            return model
        model = inner
    return model


def forward_takes(model: Any, name: str) -> bool:
    """Return whether the model's forward pass has an argument of this name.

    Architectures differ: BLOOM, which has no positions but distances, takes no `position_ids`; some compute
    all logits, and take no `logits_to_keep`.
    """
    return name in _arguments(type(unwrapped(model)).forward)


@cache
def _arguments(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


PART_MARK = "vocabulary_part"
"""Attribute of a language-model head that has the logits of some words alone."""


def vocabulary_part(model: Any) -> VocabularyPart | None:
    """Return which words a causal language model's logits are of; None: of all."""
    head = unwrapped(model).get_output_embeddings()
    part: VocabularyPart | None = getattr(head, PART_MARK, None)
    return part


def max_positions(model: Any) -> int | None:
    """Return the longest sequence that the model has positions for; None if it has no such limit."""
    limit: int | None = getattr(unwrapped(model).config, "max_position_embeddings", None)
    return limit


def model_inputs(model: Any, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Any]:
    """Return the arguments of a forward pass over whole sequences, padded on any side, as this model takes them.

    Args:
        model: a trunk or a causal language model, wrapped or not.
        input_ids: [B S].
        attention_mask: [B S], True on tokens.
    """
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask.long(), "use_cache": False}
    if forward_takes(model, "position_ids"):
        inputs["position_ids"] = position_ids(attention_mask)
    return inputs


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's weights."""
    return next(model.parameters()).device


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Return the context in which a forward pass runs in `dtype`; float32 leaves it alone."""
    return torch.autocast(device_type=device.type, dtype=dtype, enabled=dtype != torch.float32)


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Round a model's weights to `dtype`, in place; buffers stay, as rotary angles need their float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run the block with the model in evaluation mode, and put each part of it back as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def disable_dropout(model: nn.Module) -> None:
    """Set every probability of dropout in the model to zero, in place, adapters' included.

    Training mode then computes what evaluation mode does.

    A ratio of new to old probabilities is 1 at the first step only if both passes compute the same function,
    and gradient checkpointing works in training mode only: so the mode stays, and the probabilities go.
    Besides dropout modules, architectures keep probabilities as numbers of their own (`attention_dropout`,
    `hidden_dropout`, `layerdrop`). The model's configuration, which is saved with it, is left alone.
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
            continue
        for name, value in vars(module).items():
            if isinstance(value, float) and any(part in name for part in _BY_ATTRIBUTE):
                setattr(module, name, 0.0)


def checkpoint_gradients(model: Any) -> None:
    """Let the model compute activations again in the backward pass instead of keeping them.

    transformers does so in training mode only: for a deterministic forward pass, take dropout away
    (`disable_dropout`) rather than the mode.

    Raises:
        ModelError: if the architecture cannot.
    """
    inner = unwrapped(model)
    inner = getattr(inner, "trunk", inner)  # of a critic or reward model
    try:
        # the other way of checkpointing would need inputs that require a gradient, which adapters' do not
        inner.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        raise ModelError(
            f"{type(inner).__name__} cannot compute activations again in the backward pass; "
            "set gradient_checkpointing to false"
        ) from error

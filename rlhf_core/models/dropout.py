"""Dropout taken out of a model, so that training mode computes what evaluation mode does."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

_BY_ATTRIBUTE = ("dropout", "layerdrop")  # parts of the names under which architectures keep a probability


def disable_dropout(model: nn.Module) -> None:
    """Set every probability of dropout in the model to zero, in place, adapters' included.

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

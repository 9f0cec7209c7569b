"""The mode that a model is in while it learns: dropout of adapters and nothing else, checkpointed or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from rlhf_core.models.dropout import disable_dropout
from rlhf_core.models.lora import set_adapter_dropout
from rlhf_core.models.trunk import checkpoint_gradients


def checkpoint_activations(model: nn.Module) -> None:
    """Let the model compute its activations again in the backward pass, in place.

    Transformers does so in training mode only; so the model's own dropout is taken out by its probability. That of
    adapters stays.

    Raises:
        ModelError: if the architecture cannot.
    """
    adapters = [layer.lora_dropout for layer in model.modules() if isinstance(layer, LoraLayer)]
    kept = [(module, module.p) for part in adapters for module in part.modules() if isinstance(module, nn.Dropout)]
    disable_dropout(model)
    for module, probability in kept:
        module.p = probability
    checkpoint_gradients(model)


@contextmanager
def learning_mode(model: nn.Module, *, checkpointing: bool, seed: int, device: torch.device) -> Iterator[None]:
    """Run the block with adapters' dropout on, drawn from `seed`; leave model and random state as they were before.

    Any other dropout would make the ratio of new and old policy noise: the model is in evaluation mode or, for
    checkpointing, in training mode without dropout.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        if checkpointing:
            model.train()
        set_adapter_dropout(model, active=True)
        try:
            yield
        finally:
            model.eval()

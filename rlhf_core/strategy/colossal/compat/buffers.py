"""Buffers keep their precision when weights are cast.

ColossalAI casts a model whole, buffers included. In bfloat16 the rotary frequencies are off by up to 0.4 %: at the
thousandth token an angle is off by radians. transformers itself keeps them in float32 whatever the weights are in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Give the model its floating-point buffers back, on the device that they are on after the block."""
    held = {name: buffer.detach().clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    yield
    for name, tensor in held.items():
        owner, _, leaf = name.rpartition(".")
        buffers = model.get_submodule(owner)._buffers
        now = buffers[leaf]
        buffers[leaf] = tensor if now is None else tensor.to(now.device)

"""Where a model is, and in which arithmetic it runs."""

from __future__ import annotations

import torch
from torch import nn


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's weights."""
    return next(model.parameters()).device


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Return the context in which a forward pass runs in `dtype`; float32 leaves it alone."""
    return torch.autocast(device_type=device.type, dtype=dtype, enabled=dtype != torch.float32)

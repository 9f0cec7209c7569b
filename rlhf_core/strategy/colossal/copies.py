"""A copy of a model, in host memory, with weights that are handed in."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor, nn


def host_copy(model: nn.Module, tensor_for: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """Return a copy of the module whose weights and buffers are what `tensor_for` returns.

    Nothing of the model's is copied on its device.

    Args:
        model: without a booster around it; tied weights stay tied.
        tensor_for: given the name and the model's own tensor, returns the copy's, a tensor of its own.
    """
    made: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters():
        made[id(parameter)] = nn.Parameter(tensor_for(name, parameter.detach()), requires_grad=parameter.requires_grad)
    for name, buffer in model.named_buffers():
        made[id(buffer)] = tensor_for(name, buffer.detach())
    return copy.deepcopy(model, memo=dict(made))

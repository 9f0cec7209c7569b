"""Weights and moments of a model that is whole on every rank, under its own names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core.models.lora import trainable_parameters
from rlhf_core.strategy.ranks import Ranks


def weights(model: nn.Module, names: Sequence[str] | None, ranks: Ranks) -> dict[str, Tensor]:
    """Return copies, in host memory, of the named trainable weights, or of all of them on the first rank."""
    own = trainable_parameters(model)
    wanted = names if names is not None else own if ranks.is_first else ()
    return {name: own[name].detach().to("cpu", copy=True) for name in wanted}


def load_weights(model: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Copy whole tensors over the model's parameters and buffers of these names."""
    own: dict[str, Tensor] = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor)


def moments(model: nn.Module, optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """Return copies, in host memory, of an optimizer's tensors by moment and weight."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, parameter in trainable_parameters(model).items():
        for moment, tensor in optimizer.state[parameter].items():
            found.setdefault(moment, {})[name] = tensor.detach().to("cpu", copy=True)
    return found


def load_moments(model: nn.Module, optimizer: Any, given: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Give the optimizer its moments, which it knows by number, by name."""
    names = {parameter: name for name, parameter in trainable_parameters(model).items()}
    members = [member for group in optimizer.param_groups for member in group["params"]]
    covered = {name for held in given.values() for name in held}
    state = {
        # Cloned: the optimizer writes into what it is given.
        number: {moment: held[names[member]].clone() for moment, held in given.items()}
        for number, member in enumerate(members)
        if names[member] in covered
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

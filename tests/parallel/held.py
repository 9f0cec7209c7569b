"""Bytes of all tensors that a process holds, by looking at every one of them: no booster is asked."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf_core.training.optim import Trained


class Held(NamedTuple):
    """Bytes by the moment in which they came."""

    weights: int
    """After boosting: working weights, and the masters if there are any."""
    gradients: int
    """More after a backward pass."""
    moments: int
    """More after the step and the next backward pass: whether gradients are given back between them does not matter."""


def held_bytes() -> int:
    """Return the bytes of all tensors that the garbage collector knows.

    Of the last message, gloo's thread may hold a copy a moment longer: it is looked at until nothing changes.
    """
    found, last = _counted(), -1
    while found != last:
        time.sleep(0.05)
        found, last = _counted(), found
    return found


def _counted() -> int:
    """Return the bytes of the storages of all tensors, each storage once."""
    gc.collect()
    sizes: dict[tuple[torch.device, int], int] = {}
    # A subclass that overrides functions of tensors must not be asked, nor what only claims to be a tensor.
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in [each for each in gc.get_objects() if isinstance(each, Tensor) and _is_plain(each)]:
            for one in (tensor, tensor.grad if tensor.is_leaf else None):
                if one is not None:
                    storage = one.untyped_storage()
                    sizes[storage.device, storage.data_ptr()] = storage.nbytes()
    return sum(size for (device, _), size in sizes.items() if device.type != "meta")


def measured(make: Callable[[], Trained], loss_of: Callable[[nn.Module], Tensor]) -> tuple[Held, Trained]:
    """Take two steps, and return what was held when.

    Args:
        make: returns the model with what trains it.
        loss_of: of the boosted model.
    """
    gc.collect()
    gc.freeze()  # what is there already is not looked at
    try:
        trained = make()
        weights = held_bytes()
        trained.booster.backward(loss_of(trained.model), trained.optimizer)
        gradients = held_bytes() - weights
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        trained.booster.backward(loss_of(trained.model), trained.optimizer)
        moments = held_bytes() - weights - gradients
    finally:
        gc.unfreeze()
    trained.optimizer.step()
    trained.optimizer.zero_grad()
    return Held(weights, gradients, moments), trained


def _is_plain(tensor: Any) -> bool:
    of = type(tensor).__module__
    is_traced = of.startswith("torch._subclasses.")  # by torch.compile; it has no memory
    return of.partition(".")[0] in {"torch", "colossalai"} and not is_traced and tensor.layout is torch.strided

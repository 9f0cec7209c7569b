"""A transformer's layers as PyTorch compiles them: one block of code for all, whatever the number and length of rows.

In it, what lies between two products is one pass over memory. On the CPUs that were tried products take nearly all of
the time, and a step gains 2 to 10 %; it is meant for GPUs, on which nobody has tried it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_core.errors import ModelError

_FORMS = 64
"""Most pieces of code for the same layers; then PyTorch would silently compile no more."""


def check_compiles(model: nn.Module, device: torch.device) -> None:
    """See that a model's layers can be compiled, before anything depends on it; it takes some seconds.

    Raises:
        ModelError: if the model has no such layers, or what PyTorch needs is not on this machine.
    """
    if not _layers(model):
        raise ModelError(f"{type(model).__name__} has no layers that can be compiled; set compile_layers to false")
    torch._inductor.config.compile_threads = 1  # no processes that compile for this one, and may outlive it
    # The layers' code is made anew with and without gradients, for the first layer, a single row, and a tree of rows.
    torch._dynamo.config.recompile_limit = _FORMS
    try:
        torch.compile(torch.sin)(torch.ones(8, device=device))
    except Exception as error:  # each compiler fails in its own way
        told = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(
            f"PyTorch cannot compile layers here ({told}); install a C++ compiler (on a GPU Triton), or set "
            "compile_layers to false"
        ) from error


@contextmanager
def layers_compiled(model: nn.Module) -> Iterator[None]:
    """Run the block with the model's layers compiled: at their first pass in it, once for all models of a kind."""
    layers = _layers(model)
    for layer in layers:
        layer.compile(dynamic=True)
    try:
        yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


def _layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]

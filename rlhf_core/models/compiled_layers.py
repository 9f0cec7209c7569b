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
from rlhf_core.models.token_tree import in_one_group

_FORMS = 64
"""Most pieces of code for the same layers; then PyTorch would silently compile no more. It makes one with and one
without gradients, for the first layer, a single row, and a tree of rows."""


def check_compiles(device: torch.device, *, stage: str) -> None:
    """See that PyTorch can compile on a device, before anything depends on it; it takes some seconds.

    Raises:
        ModelError: if what it needs is not on this machine; it names the stage.
    """
    try:
        with _settings():
            torch.compile(torch.sin)(torch.ones(8, device=device))
    except Exception as error:  # each compiler fails in its own way
        cause = getattr(error, "inner_exception", error)
        told = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
        raise ModelError(
            f"{stage}.compile_layers: PyTorch cannot compile here ({told}); install a C++ compiler (on a GPU Triton), "
            "or set it to false"
        ) from error


class CompiledLayers:
    """The layers of a model, which it shares in code with all models of its kind; compiled at their first pass.

    Raises:
        ModelError: if the model has no such layers.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise ModelError(f"{type(model).__name__} has no layers that can be compiled; set compile_layers to false")
        # kept: made again for each step they would cost a millisecond each, and PyTorch would forget none of them
        self._calls = [(layer, torch.compile(layer._call_impl, dynamic=True)) for layer in layers]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Run the block with the model's layers compiled, and leave them as they were."""
        former = [layer._compiled_call_impl for layer, _ in self._calls]
        with _settings(), in_one_group():
            try:
                for layer, call in self._calls:
                    layer._compiled_call_impl = call
                yield
            finally:
                for (layer, _), before in zip(self._calls, former, strict=True):
                    layer._compiled_call_impl = before


@contextmanager
def _settings() -> Iterator[None]:
    """Run the block with settings for layers, which PyTorch keeps for each thread."""
    with (
        torch._dynamo.config.patch(recompile_limit=_FORMS),
        torch._inductor.config.patch(compile_threads=1),  # no processes that compile for this one, and may outlive it
    ):
        yield

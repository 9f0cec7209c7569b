"""The mode in which a model learns, and the random numbers that it draws: both come out of a block as they went in."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from rlhf_core.config.passes import PassConfig
from rlhf_core.errors import ModelError
from rlhf_core.models.attention import flash_attention_lacks
from rlhf_core.models.compiled_layers import check_compiles
from rlhf_core.models.lora import set_adapter_dropout
from rlhf_core.models.trunk import checkpoint_gradients, disable_dropout

_PYTHON_VERSION = 3  # of random.getstate's form


@contextmanager
def training_mode(model: nn.Module, *, seed: int) -> Iterator[None]:
    """Run the block with the model in training mode and its dropout drawn from `seed`; leave it in evaluation mode.

    The global random state comes out as it went in.
    """
    with undisturbed():
        torch.manual_seed(seed)
        model.train()
        try:
            yield
        finally:
            model.eval()


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


def check_passes(config: PassConfig, device: torch.device, *, try_compiling: bool = True) -> None:
    """See that a device can compute as the configuration says, before anything expensive starts.

    Raises:
        ModelError: if it cannot; it names the stage.
    """
    stage = config.STAGE
    if config.flash_attention:
        if lacks := flash_attention_lacks(device):
            raise ModelError(f"{stage}.flash_attention needs {lacks}, which is not here; set it to false")
        # not when it is configured: which arithmetic a machine takes, a run may decide by itself
        if config.dtype == "float32":
            raise ModelError(
                f"{stage}.flash_attention knows 16 bits alone, but {stage}.dtype is float32; set that to bfloat16"
            )
    if config.compile_layers and try_compiling:
        check_compiles(device, stage=stage)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run the block, and leave torch's random states as they were."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=devices):
        yield


def random_states() -> dict[str, Tensor]:
    """Return the states of torch (CPU and the current CUDA device), NumPy and Python, by name."""
    _, python_words, python_gauss = random.getstate()
    numpy_state: dict[str, Any] = dict(np.random.get_state(legacy=False))  # the global one, which loaders use
    words, position = numpy_state["state"]["key"], numpy_state["state"]["pos"]
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(python_words, dtype=torch.int64),
        "python_gauss": torch.tensor(math.nan if python_gauss is None else python_gauss, dtype=torch.float64),
        "numpy": torch.tensor([*words.tolist(), position, numpy_state["has_gauss"]], dtype=torch.int64),
        "numpy_gauss": torch.tensor(numpy_state["gauss"], dtype=torch.float64),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Put back what `random_states` returned; a CUDA state is left out on a machine without CUDA."""
    torch.set_rng_state(states["torch"])
    gauss = states["python_gauss"].item()
    random.setstate((_PYTHON_VERSION, tuple(states["python"].tolist()), None if math.isnan(gauss) else gauss))
    *words, position, has_gauss = states["numpy"].tolist()
    numpy_state = ("MT19937", np.array(words, dtype=np.uint32), position, has_gauss, states["numpy_gauss"].item())
    np.random.set_state(numpy_state)
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])

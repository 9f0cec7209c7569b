"""The random states of this process as tensors: what safetensors can hold, and no pickle need."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PYTHON_VERSION = 3  # of random.getstate's form


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

"""ColossalAI's modules, imported without its noise, and made to see a CPU where there is no GPU."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from rlhf_core.errors import ConfigError
from rlhf_core.strategy.colossal.compat.accelerator import use_cpu
from rlhf_core.strategy.colossal.compat.galore import galore_stood_in


def upstream(module: str) -> Any:
    """Return a module of ColossalAI's by its full name.

    Raises:
        ConfigError: if ColossalAI is not installed, or does not run with the packages that are.
    """
    try:
        with quiet(), galore_stood_in():
            found = importlib.import_module(module)
            if not torch.cuda.is_available():
                use_cpu(importlib.import_module("colossalai.accelerator"))
    except ImportError as error:
        raise ConfigError(
            f"this strategy needs ColossalAI, which cannot be imported ({error}); run `make setup`, or take strategy "
            "plain"
        ) from error
    _forgive_old_names()
    return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep ColossalAI's imports and plugins from telling what is not installed and not needed (apex, tensornvme)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _forgive_old_names() -> None:
    """Let ColossalAI call collectives by names that torch has given up, without a warning at every call."""
    for old in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        warnings.filterwarnings("ignore", message=f"`torch.distributed.{old}` is deprecated", category=FutureWarning)

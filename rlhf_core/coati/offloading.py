"""Models that are needed to make experience only, and rest in host memory while the others learn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class Resting:
    """Moves models to their device and, where they are to rest, away again.

    Args:
        models: what has no weights to move is left alone: None, and functions.
        device: where they work; on the CPU nothing ever moves.
        offload: whether they rest in host memory between two blocks.
    """

    def __init__(self, models: Sequence[Any], device: torch.device, *, offload: bool) -> None:
        self._models = [model for model in models if isinstance(model, torch.nn.Module)] if device.type != "cpu" else []
        self._device = device
        self._rest: torch.device | str = "cpu" if offload else device
        self._move(self._rest)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Run the block with the models on their device."""
        self._move(self._device)
        try:
            yield
        finally:
            self._move(self._rest)

    def _move(self, device: torch.device | str) -> None:
        for model in self._models:
            model.to(device)

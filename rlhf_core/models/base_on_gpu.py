"""A base on a GPU: a process copies it there once, for all of its models, and lends it to others on the same GPU.

The file of `models/base.py` is copied as it is, and weights are views of the copy. A process that is given a `Loan`
opens the lender's copy through CUDA IPC, and makes none. The lender must outlive it: makers of a run borrow from its
first trainer, and are ended before another takes its place.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor
from transformers import PreTrainedModel

from rlhf_core.errors import ModelError
from rlhf_core.models.loading import DTYPES, read_header

logger = logging.getLogger(__name__)

_HELD = "base_on_gpu"  # attribute of the transformer


class _Key(NamedTuple):
    """Which base, and on which GPU of those that a process sees."""

    file: Path
    facts: tuple[int, int, int]
    device: torch.device


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Copy:
    """A base's file in a GPU's memory, for as long as a model holds it."""

    key: _Key
    memory: Tensor

    def __deepcopy__(self, memo: object) -> _Copy:
        """Return itself: the models of a process share it."""
        return self


class Loan(NamedTuple):
    """What another process on the same GPU opens a copy with, once."""

    key: _Key
    gpu: str | None
    """Identifies the GPU, on all machines."""
    opens: Callable[..., Tensor]
    handle: tuple[Any, ...]
    """Arguments of `opens`."""


_copies: WeakValueDictionary[_Key, _Copy] = WeakValueDictionary()


def move_to_gpu(model: PreTrainedModel, file: Path, facts: tuple[int, int, int], device: torch.device) -> None:
    """Move a model to a GPU, where its weights become views of the base's copy.

    Args:
        model: its weights mapped from the file.
        file: of the base.
        facts: inode, bytes and time of change of the file.
        device: the GPU.

    Raises:
        ModelError: if the copy does not fit.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = _Key(file, facts, device)
    copy = _copies.get(key)
    if copy is None:
        if (free := _free_bytes(device)) < facts[1]:
            raise ModelError(
                f"a copy of the base takes {facts[1] / 1e9:.3g} GB on {device}, where {free / 1e9:.3g} GB are free; "
                "end what else uses this GPU, or take one with more memory (a maker makes a copy of its own where the "
                "driver has no CUDA IPC)"
            )
        mapped = torch.from_file(str(file), size=facts[1], dtype=torch.uint8)
        copy = _copies[key] = _Copy(key, mapped.to(device, copy=True))
    header = read_header(file)
    # the file ends with the last tensor
    begin = len(copy.memory) - max(each["data_offsets"][1] for name, each in header.items() if name != "__metadata__")
    for name, parameter in model.named_parameters():
        first, last = (begin + offset for offset in header[name]["data_offsets"])
        weight = copy.memory[first:last].view(DTYPES[header[name]["dtype"]])
        parameter.data = weight.view(header[name]["shape"])
    setattr(model.base_model, _HELD, copy)
    model.to(device)


def loans_of(*models: nn.Module | None) -> tuple[Loan, ...]:
    """Return what lets one other process use the bases that models have on GPUs; nothing, for models on the CPU."""
    held = {
        copy
        for model in models
        for module in (() if model is None else model.modules())
        if (copy := getattr(module, _HELD, None)) is not None
    }
    try:
        ways = [(each.key, reduce_tensor(each.memory)) for each in held]  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # a driver without IPC, or a part of a GPU
        logger.warning("the base cannot be lent, and each maker on this GPU makes a copy of its own: %s", error)
        return ()
    return tuple(Loan(key, _gpu(key.device), opens, handle) for key, (opens, handle) in ways)


@contextmanager
def borrowing(loans: Sequence[Loan]) -> Iterator[None]:
    """Have models that are loaded inside use what is lent, where it is on a GPU of this process.

    What cannot be opened is copied once more, with a warning.
    """
    opened = []  # held until models hold it
    for loan in loans:
        if loan.gpu != _gpu(loan.key.device):
            continue
        try:
            copy = _Copy(loan.key, loan.opens(*loan.handle))
        except RuntimeError as error:
            logger.warning(
                "the trainer's base on this GPU cannot be opened, and %.3g GB are taken for another copy: %s",
                loan.key.facts[1] / 1e9,
                error,
            )
            continue
        _copies[loan.key] = copy
        opened.append(copy)
    yield


def _free_bytes(device: torch.device) -> float:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf


def _gpu(device: torch.device) -> str | None:
    """Return what identifies a GPU, under the number that this process gives it; None where it has none."""
    if device.type != "cuda":
        return str(device)
    if device.index >= torch.cuda.device_count():
        return None
    return str(torch.cuda.get_device_properties(device).uuid)

"""A base on a GPU: a process copies it there once, for all of its models, and lends it to others on the same GPU.

The file of `models/base.py` lies there in one piece, and weights are views of it. A process that is given a `Loan`
opens the lender's piece through CUDA IPC, and copies nothing. The lender must outlive it: makers of a run borrow from
its trainer, and end when that does.
"""

from __future__ import annotations

import logging
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

from rlhf_core.models.loading import DTYPES, read_header

logger = logging.getLogger(__name__)

_HELD = "base_on_gpu"  # attribute of the transformer


class _Place(NamedTuple):
    """Which base, and on which GPU of those that a process sees."""

    file: Path
    facts: tuple[int, int, int]
    device: torch.device


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Piece:
    """A base's file in a GPU's memory, for as long as a model holds it."""

    place: _Place
    memory: Tensor

    def __deepcopy__(self, memo: object) -> _Piece:
        """Return itself: the models of a process share it."""
        return self


class Loan(NamedTuple):
    """What another process on the same GPU opens a piece with, once."""

    place: _Place
    gpu: str | None
    """Identifies the GPU, on all machines."""
    opens: Callable[..., Tensor]
    handle: tuple[Any, ...]
    """Arguments of `opens`."""


_pieces: WeakValueDictionary[_Place, _Piece] = WeakValueDictionary()


def place(model: PreTrainedModel, file: Path, facts: tuple[int, int, int], device: torch.device) -> None:
    """Have a model's weights, mapped from a base's file, be those on a GPU instead; what else it has goes there too.

    Args:
        model: as it was loaded, on the CPU.
        file: of the base.
        facts: inode, bytes and time of change of the file.
        device: the GPU.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    where = _Place(file, facts, device)
    piece = _pieces.get(where)
    if piece is None:
        mapped = torch.from_file(str(file), size=facts[1], dtype=torch.uint8)
        piece = _pieces[where] = _Piece(where, mapped.to(device, copy=True))
    header = read_header(file)
    begin = 8 + int.from_bytes(bytes(piece.memory[:8].tolist()), "little")
    for name, parameter in model.named_parameters():
        first, last = (begin + offset for offset in header[name]["data_offsets"])
        weight = piece.memory[first:last].view(DTYPES[header[name]["dtype"]])
        parameter.data = weight.view(header[name]["shape"])
    setattr(model.base_model, _HELD, piece)
    model.to(device)


def loans_of(*models: nn.Module | None) -> tuple[Loan, ...]:
    """Return what lets one other process use the bases that models have on GPUs; nothing, for models on the CPU."""
    held = {
        piece
        for model in models
        for module in (() if model is None else model.modules())
        if (piece := getattr(module, _HELD, None)) is not None
    }
    try:
        ways = [(each.place, reduce_tensor(each.memory)) for each in held]  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # a driver without IPC, or a part of a GPU
        logger.warning("makers on this GPU load a base of their own, since it cannot be lent: %s", error)
        return ()
    return tuple(Loan(where, _gpu(where.device), opens, handle) for where, (opens, handle) in ways)


@contextmanager
def borrowing(loans: Sequence[Loan]) -> Iterator[None]:
    """Have models that are loaded inside use what is lent, where it is on a GPU of this process.

    What cannot be opened is loaded once more, with a warning.
    """
    opened = []  # held until models hold it
    for loan in loans:
        if loan.gpu != _gpu(loan.place.device):
            continue
        try:
            piece = _Piece(loan.place, loan.opens(*loan.handle))
        except RuntimeError as error:
            logger.warning("the trainer's base on this GPU cannot be opened, and is loaded once more: %s", error)
            continue
        _pieces[loan.place] = piece
        opened.append(piece)
    yield


def _gpu(device: torch.device) -> str | None:
    """Return what identifies a GPU, under the number that this process gives it; None where it has none."""
    if device.type != "cuda":
        return str(device)
    if (device.index or 0) >= torch.cuda.device_count():
        return None
    return str(torch.cuda.get_device_properties(device).uuid)

"""The kernels' library: built for this processor at first use, loaded into the process, and called on tensors.

Where it cannot be had (no compiler, no Linux), that is logged, and callers have PyTorch do the work. Last bits differ:
training states note which it was.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rlhf_core.kernels.building import KernelError, have_built, processor, user_cache

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
_SUFFIXES = {torch.float32: "float", torch.bfloat16: "half"}
_POINTER, _INTEGER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SHAPE = (_INTEGER,) * 4
_ARGUMENTS = {
    "multiply": (*(_POINTER,) * 3, *_SHAPE, _INTEGER, _INTEGER),
    "norm": (*(_POINTER,) * 4, _INTEGER, _INTEGER, _FLOAT),
    "gate": (_POINTER, _POINTER, _INTEGER, _INTEGER),
    "turn": (*(_POINTER,) * 5, _INTEGER, _INTEGER, *_SHAPE),
    "attend": (*(_POINTER,) * 4, _INTEGER, _INTEGER, *(_POINTER,) * 4, _INTEGER, _INTEGER, _FLOAT, *_SHAPE),
    "read": (_POINTER, _POINTER, _FLOAT, *(_POINTER,) * 4, *_SHAPE, _INTEGER),
    "read_backward": (_POINTER, _POINTER, _FLOAT, *(_POINTER,) * 6, *_SHAPE, _INTEGER),
    "draw": (_POINTER, _POINTER, _FLOAT, _POINTER, _POINTER, _INTEGER, _INTEGER),
}

log = logging.getLogger(__name__)


class Library(NamedTuple):
    """The kernels as they are loaded."""

    name: str
    """A digest of what they were built from and for."""
    functions: ctypes.CDLL


def has_kernels(tensor: Tensor) -> bool:
    """Return whether there are kernels for a tensor's numbers, where it lies.

    Not for subclasses, whose memory may be elsewhere or nowhere: shards of Gemini, or tensors without data.
    """
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" and tensor.dtype in _SUFFIXES
    return is_plain and library() is not None


def used_on(device: torch.device) -> str:
    """Return the name of the library that is used on a device; `none` where PyTorch does its work."""
    loaded = library() if device.type == "cpu" else None
    return "none" if loaded is None else loaded.name


def call(name: str, dtype: torch.dtype, *arguments: Tensor | float | None) -> None:
    """Call a kernel; tensors go by address, and are contiguous but for those whose strides it takes.

    Threads are PyTorch's.
    """
    loaded = library()
    assert loaded is not None, "has_kernels comes first"
    plain = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
    getattr(loaded.functions, f"{name}_{_SUFFIXES[dtype]}")(*plain)


@cache
def library() -> Library | None:
    """Return the library, built first if need be; None where it cannot be had, which is logged once."""
    if sys.platform != "linux":
        return None
    try:
        return _load()
    except (KernelError, OSError, AttributeError) as error:
        log.warning("our library is not used, and all takes longer: %s", error)
        return None


def _load() -> Library:
    parts = (SOURCE.read_bytes(), " ".join(FLAGS).encode(), processor().encode())
    name = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    file = user_cache() / f"kernels-{name}.so"
    have_built(file, _commands, what="the kernels")
    for place in _openmp():  # the one that PyTorch has, with its threads; another would have threads of its own
        ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL)
    try:
        functions = ctypes.CDLL(str(file))
        for kernel, types in _ARGUMENTS.items():
            for suffix in _SUFFIXES.values():
                function = getattr(functions, f"{kernel}_{suffix}")  # kept by the library; an item is made anew
                function.argtypes, function.restype = types, None
    except (OSError, AttributeError) as error:
        raise KernelError(f"its kernel {file} cannot be loaded ({error}); delete that file") from error
    return Library(name, functions)


def _commands(compiler: str, made: Path) -> list[list[str]]:
    """Return how they are built; linked apart, since `-fopenmp` would name a library of threads beside PyTorch's."""
    compiled = made.with_suffix(".o")
    return [
        [compiler, *FLAGS, "-c", str(SOURCE), "-o", str(compiled)],
        [compiler, "-shared", str(compiled), "-o", str(made)],
    ]


def _openmp() -> list[str]:
    """Return PyTorch's library of OpenMP, or else what this process has loaded of others."""
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    mapped = {path for line in lines for path in line[5:]}
    found = sorted(each for each in mapped if Path(each).name.startswith(("libgomp", "libiomp5", "libomp")))
    own = str(Path(torch.__file__).parent)  # beside it is torch.libs
    return [each for each in found if each.startswith(own)] or found

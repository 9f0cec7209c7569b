"""The kernels' library: compiled once for this processor, loaded into the process, and called on tensors.

It lies in the user's cache directory under a name that says what it was compiled from, by what and for which processor.
Where there is no compiler, or the system is not Linux, callers do in PyTorch what they would have a kernel do: a run
notes which of both it was (`kind`), since the last bits differ.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
COMPILE_TIMEOUT_S = 120.0
COMPILER = "RLHF_CXX"
"""Environment variable: the C++ compiler, or nothing for none; `c++` or `g++` where it is not set."""
_SUFFIXES = {torch.float32: "float", torch.bfloat16: "half"}
_POINTER, _INTEGER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SHAPE = (_INTEGER,) * 4
_ARGUMENTS = {
    "norm": (*(_POINTER,) * 4, _INTEGER, _INTEGER, _FLOAT),
    "norm_back": (*(_POINTER,) * 5, _INTEGER, _INTEGER, _FLOAT),
    "gate": (*(_POINTER,) * 3, *(_INTEGER,) * 3),
    "gate_back": (*(_POINTER,) * 5, _INTEGER, _INTEGER),
    "rotate": (*(_POINTER,) * 4, *(_INTEGER,) * 3, _FLOAT),
    "turn": (*(_POINTER,) * 5, _INTEGER, _INTEGER, *_SHAPE),
    "attend": (*(_POINTER,) * 5, _INTEGER, _INTEGER, _FLOAT, *_SHAPE),
    "draw": (_POINTER, _POINTER, _FLOAT, _POINTER, _POINTER, _INTEGER, _INTEGER),
}

log = logging.getLogger(__name__)


def has_kernels(tensor: Tensor) -> bool:
    """Return whether there are kernels for numbers of a tensor's dtype, where it lies."""
    return tensor.device.type == "cpu" and tensor.dtype in _SUFFIXES and library() is not None


def kind() -> str:
    """Return what stands for the kernels in a run's notes: the start of their library's name; `none` without."""
    return "none" if library() is None else _name(_compiler() or "")[:12]


def call(name: str, dtype: torch.dtype, *arguments: Tensor | float | None) -> None:
    """Call a kernel; tensors, which must be contiguous, go by address. Threads are PyTorch's."""
    loaded = library()
    assert loaded is not None, "has_kernels comes first"
    plain = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
    getattr(loaded, f"{name}_{_SUFFIXES[dtype]}")(*plain)


@cache
def library() -> ctypes.CDLL | None:
    """Return the library, compiled first if need be; None where it cannot be had, which is logged."""
    compiler = _compiler()
    if compiler is None or sys.platform != "linux":
        return None
    file = _cache_directory() / f"{_name(compiler)}.so"
    try:
        if not file.is_file():
            _compile(compiler, file)
        for place in _openmp():  # the one that PyTorch has, with its threads; another would have threads of its own
            ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL)
        loaded = ctypes.CDLL(str(file))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        log.warning("the kernels cannot be compiled by %s, and PyTorch does their work, slower: %s", compiler, said)
        return None
    for name, types in _ARGUMENTS.items():
        for suffix in _SUFFIXES.values():
            function = getattr(loaded, f"{name}_{suffix}")  # kept by the library; an item would be made anew
            function.argtypes, function.restype = types, None
    return loaded


def _compiler() -> str | None:
    named = os.environ.get(COMPILER)
    return (shutil.which("c++") or shutil.which("g++")) if named is None else shutil.which(named)


@cache
def _name(compiler: str) -> str:
    """Return a digest of all that the library depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=COMPILE_TIMEOUT_S, check=True).stdout
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    processor = next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")
    parts = (SOURCE.read_bytes(), " ".join(FLAGS).encode(), version, processor)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf-flows" / "kernels"


def _compile(compiler: str, file: Path) -> None:
    """Compile under another name, and rename it when it is whole: several processes may do so at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=file.parent) as folder:
        made, whole = Path(folder) / "kernels.o", Path(folder) / file.name
        # linked apart: with -fopenmp the linker would name a library of threads beside PyTorch's
        for command in (
            [compiler, *FLAGS, "-c", str(SOURCE), "-o", str(made)],
            [compiler, "-shared", str(made), "-o", str(whole)],
        ):
            subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=True)
        whole.replace(file)


def _openmp() -> list[str]:
    """Return the library of OpenMP that this process has loaded."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return sorted(each for each in mapped if Path(each).name.startswith(("libgomp", "libiomp5", "libomp")))

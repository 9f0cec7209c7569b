"""ColossalAI's Adam kernel for host memory, built by a C++ compiler alone.

Upstream builds it as an extension of CUDA, whose headers it names but hardly uses: ours in `stubs` stand in for them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import sysconfig
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch

from rlhf_core.kernels.building import DEADLINE_S, KernelError, have_built, processor, user_cache

NAME = "host_adam"
STUBS = Path(__file__).parent / "stubs"
_SOURCES = {"x86_64": "kernel/x86/cpu_adam.cpp", "aarch64": "kernel/arm/cpu_adam_arm.cpp"}
_FLAGS = ("-O3", "-std=c++20", "-march=native", "-fopenmp", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={NAME}")


def load_kernel(csrc: Path, *, cache: Path | None = None, deadline_s: float = DEADLINE_S) -> Any:
    """Return the kernel's module, built at first use.

    Args:
        csrc: ColossalAI's directory of kernel sources.
        cache: where built kernels lie; None takes the user's.
        deadline_s: longest wait for the compiler, or for another process that builds the same.

    Raises:
        KernelError: if it cannot be built here.
    """
    cache = user_cache() if cache is None else cache
    source = csrc / _source()
    target = cache / f"{NAME}-torch{torch.__version__}-{_digest(source)}.so"

    def commands(compiler: str, made: Path) -> list[list[str]]:
        return [[compiler, *_FLAGS, *_includes(), str(source), "-o", str(made), *_libraries()]]

    have_built(target, commands, what="HybridAdam's kernel", deadline_s=deadline_s)
    return _imported(target)


def _source() -> str:
    machine = platform.machine()
    if machine not in _SOURCES:
        raise KernelError(f"its kernel knows processors {' and '.join(_SOURCES)} alone, not {machine}")
    return _SOURCES[machine]


def _digest(source: Path) -> str:
    """Return what tells kernels apart."""
    found = hashlib.sha256()
    for path in sorted([*source.parent.iterdir(), *STUBS.rglob("*.h")]):
        found.update(path.read_bytes())
    facts = [torch.__version__, str(sysconfig.get_config_var("EXT_SUFFIX")), processor(), *_FLAGS]
    found.update("\n".join(facts).encode())
    return found.hexdigest()[:16]


def _includes() -> list[str]:
    headers = Path(torch.__file__).parent / "include"
    system = [headers, headers / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_paths()["include"])]
    return ["-I", str(STUBS), *(word for path in system for word in ("-isystem", str(path)))]


def _libraries() -> list[str]:
    """Return the linker's arguments; where the libraries are, torch, which is loaded by then, has told the loader."""
    return [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]


def _imported(path: Path) -> Any:
    loader = ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    if spec is None:
        raise KernelError(f"its kernel {path} is no module of Python's")
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise KernelError(f"its kernel {path} cannot be loaded ({error}); delete that file") from error
    return module

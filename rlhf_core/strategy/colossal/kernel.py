"""ColossalAI's Adam kernel for host memory, built by a C++ compiler alone.

Upstream builds it as an extension of CUDA, whose headers it names but hardly uses: ours in `stubs` stand in for them.
It is built once for each user, processor and release of torch, whichever of several processes needs it first.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

NAME = "host_adam"
DEADLINE_S = 300.0
"""Longest wait for a compiler, or for another process that runs one; ten seconds are usual."""
STUBS = Path(__file__).parent / "stubs"
_SOURCES = {"x86_64": "kernel/x86/cpu_adam.cpp", "aarch64": "kernel/arm/cpu_adam_arm.cpp"}
_FLAGS = ("-O3", "-std=c++20", "-march=native", "-fopenmp", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={NAME}")

logger = logging.getLogger(__name__)


class KernelError(Exception):
    """Why there is no kernel, as the middle of a sentence; who wanted it says what to do."""


def user_cache() -> Path:
    """Return the directory of this user's kernels."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "rlhf-flows" / "kernels"


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
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            with alone(target.with_suffix(".lock"), deadline_s):
                if not target.exists():  # else another process built it in the meantime
                    _build(source, target, deadline_s)
    except OSError as error:
        raise KernelError(f"its kernel cannot be kept in {cache} ({error})") from error
    return _imported(target)


def _source() -> str:
    machine = platform.machine()
    if machine not in _SOURCES:
        raise KernelError(f"its kernel knows processors {' and '.join(_SOURCES)} alone, not {machine}")
    return _SOURCES[machine]


def _digest(source: Path) -> str:
    """Return what tells kernels apart: a home directory may serve several machines."""
    found = hashlib.sha256()
    for path in sorted([*source.parent.iterdir(), *STUBS.rglob("*.h")]):
        found.update(path.read_bytes())
    facts = [torch.__version__, str(sysconfig.get_config_var("EXT_SUFFIX")), _processor(), *_FLAGS]
    found.update("\n".join(facts).encode())
    return found.hexdigest()[:16]


def _processor() -> str:
    """Return what `-march=native` looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


@contextmanager
def alone(lock: Path, deadline_s: float) -> Iterator[None]:
    """Run the block in one process at a time; the lock goes with its process, however that ends."""
    try:
        held = FileLock(lock, timeout=deadline_s, poll_interval=0.1, fallback_to_soft=False).acquire()
    except Timeout:
        raise KernelError(
            f"another process has been building its kernel for {deadline_s:.0f} s (it holds {lock})"
        ) from None
    with held:
        yield


def _build(source: Path, target: Path, deadline_s: float) -> None:
    """Compile the kernel; the target appears whole or not at all."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise KernelError("its kernel needs a C++ compiler, and there is no g++")
    logger.info("building HybridAdam's kernel with %s into %s (once, about 10 s)", compiler, target.parent)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as workplace:
        made = Path(workplace) / target.name
        try:
            done = subprocess.run(
                [compiler, *_FLAGS, *_includes(), str(source), "-o", str(made), *_libraries()],
                capture_output=True, text=True, timeout=deadline_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise KernelError(f"{compiler} was not done with its kernel after {deadline_s:.0f} s") from error
        if done.returncode:
            raise KernelError(f"{compiler} cannot build its kernel ({_first_error(done.stderr)})")
        made.replace(target)
    logger.info("built HybridAdam's kernel in %.0f s", time.monotonic() - started)


def _includes() -> list[str]:
    headers = Path(torch.__file__).parent / "include"
    system = [headers, headers / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_paths()["include"])]
    return ["-I", str(STUBS), *(word for path in system for word in ("-isystem", str(path)))]


def _libraries() -> list[str]:
    """Return the linker's arguments; where the libraries are, torch, which is loaded by then, has told the loader."""
    return [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]


def _first_error(output: str) -> str:
    lines = output.splitlines() or ["it said nothing"]
    return next((line for line in lines if "error" in line.lower()), lines[-1])


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

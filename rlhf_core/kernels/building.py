"""Compiles C++ at first use: once for each user and processor, whichever of several processes needs it first."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

DEADLINE_S = 300.0
"""Longest wait for a compiler, or for another process that runs one; ten seconds are usual."""

logger = logging.getLogger(__name__)


class KernelError(Exception):
    """Why there is no kernel, as the middle of a sentence; who wanted it says what to do."""


def user_cache() -> Path:
    """Return the directory of this user's kernels.

    Raises:
        KernelError: if the user has no home directory.
    """
    try:
        return Path.home() / ".cache" / "rlhf-flows" / "kernels"
    except RuntimeError as error:
        raise KernelError("its kernel is kept in the home directory, and this user has none") from error


def processor() -> str:
    """Return what `-march=native` looks at: a home directory may serve several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "cpu\t")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def have_built(
    target: Path,
    commands: Callable[[str, Path], Sequence[Sequence[str]]],
    *,
    what: str,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Build a library unless it is there; it appears whole or not at all.

    Args:
        target: the library.
        commands: returns the command lines, from the compiler and the temporary file that they write.
        what: the kernel, for the log.
        deadline_s: longest wait for the compiler, or for another process that builds the same.

    Raises:
        KernelError: if it cannot be built here.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            with alone(target.with_suffix(".lock"), deadline_s):
                if not target.exists():  # else another process built it in the meantime
                    _build(target, commands, what, deadline_s)
    except OSError as error:
        raise KernelError(f"its kernel cannot be kept in {target.parent} ({error})") from error


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


def _build(
    target: Path, commands: Callable[[str, Path], Sequence[Sequence[str]]], what: str, deadline_s: float
) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise KernelError("its kernel needs a C++ compiler, and there is no g++")
    logger.info("building %s with %s into %s (once, about 10 s)", what, compiler, target.parent)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as workplace:
        made = Path(workplace) / target.name
        for command in commands(compiler, made):
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
            except subprocess.TimeoutExpired as error:
                raise KernelError(f"{compiler} was not done with its kernel after {deadline_s:.0f} s") from error
            except OSError as error:
                raise KernelError(f"{compiler} cannot be started for its kernel ({error})") from error
            if done.returncode:
                raise KernelError(f"{compiler} cannot build its kernel ({_first_error(done.stderr)})")
        with made.open("rb") as stream:
            os.fsync(stream.fileno())  # a library that is cut off ends whoever loads it by a bus error
        made.replace(target)
    logger.info("built %s in %.0f s", what, time.monotonic() - started)


def _first_error(output: str) -> str:
    lines = output.splitlines() or ["it said nothing"]
    return next((line for line in lines if "error" in line.lower()), lines[-1])

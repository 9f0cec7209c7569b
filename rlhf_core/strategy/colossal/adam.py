"""ColossalAI's HybridAdam, with kernels that are built here at first use."""

from __future__ import annotations

import importlib
import logging
import re
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from rlhf_core.strategy.colossal.compat import upstream
from rlhf_core.strategy.colossal.compat.adam import forget_powers, host_kernel, use_host_kernel
from rlhf_core.strategy.colossal.compat.loading import quiet
from rlhf_core.strategy.colossal.kernel import KernelError, alone

_NVCC_S = 1800.0
"""Longest wait for another process that builds kernels for GPUs."""
Groups = Iterable[Mapping[str, Any]]

logger = logging.getLogger(__name__)


def hybrid_adam(groups: Groups, *, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """Return HybridAdam, with decoupled weight decay, its kernels built at first use.

    Raises:
        KernelError: if they cannot be built here.
    """
    members = [dict(group) for group in groups]
    if torch.cuda.is_available():
        return _with_cuda_kernels(members, betas)
    host_kernel()
    use_host_kernel()
    return _made(members, betas)


def _with_cuda_kernels(groups: list[dict[str, Any]], betas: tuple[float, float]) -> torch.optim.Optimizer:
    """Return HybridAdam with upstream's kernels for GPU and host, which nvcc builds at first use."""
    check_nvcc()
    extension = upstream("colossalai.kernel.extensions.base_extension")._Extension
    folder = Path(extension.get_jit_extension_folder_path())
    is_built = any(folder.glob("fused_optim_cuda*.so"))
    if not is_built:
        logger.info("building HybridAdam's kernels with nvcc into %s (once, some minutes)", folder)
    started = time.monotonic()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder / "ours.lock", _NVCC_S):
            # torch's own lock outlives a build that was killed, and whoever builds next would wait for it for ever
            (folder / "lock").unlink(missing_ok=True)
            made = _made(groups, betas)
    except KernelError:
        raise
    except Exception as error:  # whatever ColossalAI and torch raise where a build fails
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise KernelError(f"its kernels for GPUs cannot be built ({reason})") from error
    if not is_built:
        logger.info("HybridAdam's kernels are there after %.0f s", time.monotonic() - started)
    return made


def _made(groups: list[dict[str, Any]], betas: tuple[float, float]) -> torch.optim.Optimizer:
    with quiet():
        made: torch.optim.Optimizer = upstream("colossalai.nn.optimizer").HybridAdam(groups, betas=betas)
    forget_powers(made)
    return made


def check_nvcc() -> None:
    """See that CUDA's compiler is there, of the release that torch was built with.

    Raises:
        KernelError: if not.
    """
    try:
        home = importlib.import_module("torch.utils.cpp_extension").CUDA_HOME
    except ImportError as error:
        raise KernelError(f"its kernels for GPUs need torch's tools for extensions ({error})") from error
    wanted = str(torch.version.cuda).partition(".")[0]
    nvcc = Path(home or "", "bin", "nvcc")
    if home is None or not nvcc.is_file():
        raise KernelError(
            f"its kernels for GPUs need nvcc of CUDA {wanted}, and there is none; CUDA_HOME may tell where it is"
        )
    told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    release = re.search(r"release (\d+)", told)
    if release is None or release[1] != wanted:
        found = "cannot be asked for its release" if release is None else f"is of CUDA {release[1]}"
        raise KernelError(
            f"its kernels for GPUs need nvcc of CUDA {wanted}, which torch was built with; {nvcc} {found}"
        )

"""HybridAdam as it should be: kernels built at first use, on a CPU too, and gradients scaled whatever their precision.

Our own kernel is for a CPU alone. `forget_powers` and `widen_gradients` concern what is stepped in host memory, also
beside a GPU.
"""

from __future__ import annotations

import importlib
import logging
import re
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rlhf_core.kernels.building import KernelError, alone
from rlhf_core.strategy.colossal.compat.loading import quiet, upstream
from rlhf_core.strategy.colossal.kernel import load_kernel

Groups = Iterable[Mapping[str, Any]]
_NVCC_S = 1800.0
"""Longest wait for another process that builds kernels for GPUs."""

logger = logging.getLogger(__name__)

# At its first step it counts storages, in a way of torch's that is to go.
warnings.filterwarnings("ignore", message="TypedStorage is deprecated", module="colossalai")


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
    """Check that CUDA's compiler is there, of the release that torch was built with.

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


class HostKernel:
    """The kernel for host memory as an extension of ColossalAI's loader, which has it as one of CUDA's alone."""

    name = "host_adam"
    priority = 2
    """Before upstream's, should that be found usable too."""

    def is_available(self) -> bool:
        """Return True: whether it can be built turns out when it is."""
        return True

    def assert_compatible(self) -> None:
        """Do nothing, as in `is_available`."""

    def load(self) -> Any:
        """Return the kernel's module."""
        return host_kernel()


@cache
def host_kernel() -> Any:
    """Return the module of the kernel for host memory, built at first use.

    Raises:
        KernelError: if it cannot be built here.
    """
    return load_kernel(Path(upstream("colossalai.kernel.extensions").__file__).parent / "csrc")


def use_host_kernel() -> None:
    """Let HybridAdam find our kernel; nothing if it does already."""
    loader = upstream("colossalai.kernel.kernel_loader").CPUAdamLoader
    if HostKernel not in loader.REGISTRY:
        loader.register_extension(HostKernel)


class Memoryless:
    """The kernel's object without a memory.

    It remembers the powers of beta of its last step and multiplies on, which differs in the last bit from what it
    computes after a restart: a run that was interrupted would not go on as if it had not been.
    """

    def __init__(self, kind: Callable[..., Any], *, decoupled: bool) -> None:
        self._kind = kind
        self._decoupled = decoupled

    def step(self, step: int, lr: float, *rest: Any) -> None:
        """Update one tensor in place, as if for the first time."""
        # With no beta of its own, it takes the given ones for new, and computes their powers.
        self._kind(lr, 0.0, 0.0, 0.0, 0.0, self._decoupled).step(step, lr, *rest)


def forget_powers(optimizer: Any) -> None:
    """Let a HybridAdam step without its kernel's memory."""
    if not isinstance(optimizer.cpu_adam_op, Memoryless):
        optimizer.cpu_adam_op = Memoryless(type(optimizer.cpu_adam_op), decoupled=optimizer.adamw_mode)


def widen_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Give float32 weights in host memory gradients in float32.

    HybridAdam leaves the divisor of gradients, by which they are clipped, out of account where they are bfloat16 and
    in host memory, for which it has no kernel. That for float32 divides.
    """
    for member in [member for group in optimizer.param_groups for member in group["params"]]:
        gradient = member.grad
        if gradient is not None and (gradient.dtype, member.dtype) == (torch.bfloat16, torch.float32):
            member.grad = gradient if gradient.is_cuda else gradient.float()

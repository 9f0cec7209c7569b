"""HybridAdam as it should be: with a kernel that needs no CUDA, and with gradients scaled whatever their precision.

The kernel is wanted on a CPU alone. The other two concern what is stepped in host memory, also beside a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rlhf_core.strategy.colossal.compat.loading import upstream
from rlhf_core.strategy.colossal.kernel import load_kernel

# At its first step it counts storages, in a way of torch's that is to go.
warnings.filterwarnings("ignore", message="TypedStorage is deprecated", module="colossalai")


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

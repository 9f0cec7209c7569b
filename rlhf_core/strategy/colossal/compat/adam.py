"""HybridAdam as it should be: with a kernel that needs no CUDA, and with gradients scaled whatever their precision.

The kernel is wanted on a CPU alone. The other two concern whatever is stepped in host memory, also beside a GPU.
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

    def __init__(self, kind: Callable[..., Any]) -> None:
        self._kind = kind

    def step(self, step: int, lr: float, *rest: Any) -> None:
        """Update one tensor in place, as if for the first time."""
        self._kind(lr, 0.0, 0.0, 0.0, 0.0, True).step(step, lr, *rest)  # no beta of its own: the given ones are new


class ExactHybridAdam(upstream("colossalai.nn.optimizer").HybridAdam):  # type: ignore[misc]
    """ColossalAI's HybridAdam in its decoupled form, which is AdamW.

    Upstream leaves the divisor of gradients, by which they are clipped and unscaled, out of account where a bfloat16
    gradient lies in host memory: no kernel takes such a gradient. Widened, the kernel for float32 does.

    Args:
        groups: of parameters, as torch's optimizers take them.
        betas: decay of the two moments.
    """

    cpu_adam_op: Any

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float]) -> None:
        super().__init__(groups, betas=betas, adamw_mode=True)
        self.cpu_adam_op = Memoryless(type(self.cpu_adam_op))

    @torch.no_grad()
    def step(self, closure: Any = None, div_scale: float = -1.0) -> Any:
        """Step from gradients divided by `div_scale`; -1 leaves them as they are."""
        for member in [member for group in self.param_groups for member in group["params"]]:
            gradient = member.grad
            if gradient is not None and (gradient.dtype, member.dtype) == (torch.bfloat16, torch.float32):
                member.grad = gradient if gradient.is_cuda else gradient.float()
        return super().step(closure, div_scale)

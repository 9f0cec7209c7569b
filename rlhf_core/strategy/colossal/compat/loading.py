"""ColossalAI's modules, imported without its noise, and made to see a CPU where there is no GPU.

Its own CPU accelerator raises at every question about streams, memory and synchronization, though its optimizers ask
them on any device. On a CPU everything happens in the order of the program: a stream is a name without a meaning.

`colossalai.nn.optimizer` imports galore_torch, and bitsandbytes for its optimizers in 8 bits: 125 MB, which peft would
then import in every process, for a second. Nobody here uses them: they get stand-ins.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import peft  # noqa: F401 - looks for bitsandbytes once, which is to be before there is a stand-in
import torch

from rlhf_core.errors import ConfigError

_NAMES = {
    "galore_torch": ("GaLoreAdafactor", "GaLoreAdamW"),
    "bitsandbytes": (),
    "bitsandbytes.optim": (),
    "bitsandbytes.optim.optimizer": ("Optimizer2State",),
}
"""Modules, and the classes that are imported from them."""


@contextmanager
def galore_stood_in() -> Iterator[None]:
    """Let ColossalAI be imported without the two packages; one that is installed is taken as it is."""
    absent = {name for name in ("galore_torch", "bitsandbytes") if name not in sys.modules and find_spec(name) is None}
    stand_ins = {name: _stand_in(name, classes) for name, classes in _NAMES.items() if name.split(".")[0] in absent}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


@contextmanager
def left_uncompiled() -> Iterator[None]:
    """Have `torch.compile` return what it is given: ColossalAI decorates functions for GPUs, which takes seconds."""
    known = torch.compile

    def as_it_is(model: Any = None, **_: Any) -> Any:
        return (lambda function: function) if model is None else model

    torch.compile = as_it_is
    try:
        yield
    finally:
        torch.compile = known


def _stand_in(name: str, classes: tuple[str, ...]) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    for each in classes:
        setattr(module, each, type(each, (), {}))
    return module


class ProgramOrder:
    """The one stream of a CPU."""

    def wait_stream(self, other: Any) -> None:
        """Do nothing: what was called before is done."""

    def synchronize(self) -> None:
        """Do nothing: what was called before is done."""


def use_cpu(accelerator: Any) -> None:
    """Make the CPU the device of all that ColossalAI does; nothing if it is already.

    Args:
        accelerator: ColossalAI's module of that name.
    """
    if not isinstance(accelerator.get_accelerator(), _Marked):
        accelerator.set_accelerator(_cpu_accelerator(accelerator))


class _Marked:
    """What tells our accelerator from theirs."""


def _cpu_accelerator(accelerator: Any) -> Any:
    class GlooAccelerator(_Marked, accelerator.CpuAccelerator):  # type: ignore[misc]
        """Answers as a device of one stream with nothing in flight."""

        def synchronize(self, device: Any = None) -> None:
            """Do nothing: nothing is in flight."""

        def Stream(self, device: Any = None, priority: int = 0, **kwargs: Any) -> ProgramOrder:  # noqa: N802, ARG002
            """Return the one stream."""
            return ProgramOrder()

        def current_stream(self, device: Any = None) -> ProgramOrder:  # noqa: ARG002
            """Return the one stream."""
            return ProgramOrder()

        def stream(self, stream_: Any) -> AbstractContextManager[None]:  # noqa: ARG002
            """Return a context that does nothing."""
            return nullcontext()

    return GlooAccelerator()


def upstream(module: str) -> Any:
    """Return a module of ColossalAI's by its full name.

    Raises:
        ConfigError: if ColossalAI is not installed, or does not run with the packages that are.
    """
    try:
        has_gpu = torch.cuda.is_available()
        with quiet(), galore_stood_in(), nullcontext() if has_gpu else left_uncompiled():
            found = importlib.import_module(module)
            if not has_gpu:
                use_cpu(importlib.import_module("colossalai.accelerator"))
    except ImportError as error:
        raise ConfigError(
            f"this strategy needs ColossalAI, which cannot be imported ({error}); run `make setup`, or take strategy "
            "plain"
        ) from error
    _forgive_old_names()
    return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep ColossalAI's imports and plugins from telling what is not installed and not needed (apex, tensornvme)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _forgive_old_names() -> None:
    """Let ColossalAI call collectives by names that torch has given up, without a warning at every call."""
    for old in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        warnings.filterwarnings("ignore", message=f"`torch.distributed.{old}` is deprecated", category=FutureWarning)

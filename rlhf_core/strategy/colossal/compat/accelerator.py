"""A CPU as ColossalAI's device.

Its own CPU accelerator raises at every question about streams, memory and synchronization, though its optimizers ask
them on any device. On a CPU everything happens in the order of the program: a stream is a name without a meaning.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any


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

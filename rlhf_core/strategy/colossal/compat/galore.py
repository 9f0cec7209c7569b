"""Stand-ins for what ColossalAI's GaLore optimizers import, which nobody here uses.

`colossalai.nn.optimizer` imports galore_torch, and bitsandbytes for its optimizers in 8 bits: 125 MB, which peft would
then import in every process, for a second.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

import peft  # noqa: F401 - looks for bitsandbytes once, which is to be before there is a stand-in

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


def _stand_in(name: str, classes: tuple[str, ...]) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    for each in classes:
        setattr(module, each, type(each, (), {}))
    return module

"""Which engine makes the responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from rlhf_core.errors import ConfigError
from rlhf_core.generation.hf import HfEngine
from rlhf_core.generation.native import NativeEngine

if TYPE_CHECKING:
    from rlhf_core.generation.settings import GenerationEngine

_ENGINES: dict[str, type[NativeEngine | HfEngine]] = {"native": NativeEngine, "hf": HfEngine}


def make_engine(name: Literal["native", "hf"] | str, model: Any, *, tokenizer: Any = None) -> GenerationEngine:
    """Return an engine around a model, which stays the caller's.

    Args:
        name: native, our own decoding loop; hf, transformers' `generate`.
        model: a causal language model of transformers, or a PEFT model around one.
        tokenizer: reads the text for stop strings; needed for these only.

    Raises:
        ConfigError: if there is no engine of this name.
    """
    if name not in _ENGINES:
        raise ConfigError(f"there is no generation engine {name!r}; choose one of {', '.join(_ENGINES)}")
    return _ENGINES[name](model, tokenizer=tokenizer)

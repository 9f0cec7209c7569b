"""Keys and values of a generation whose greatest length is known from the start."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class _ReservedLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """One layer's keys and values in memory that is reserved at once, of which the written part is shown.

    transformers' growing layer copies all it holds for each token; its static layer copies nothing, but has
    attention run over the whole length at every step, what is not yet written included.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length
        self._memory: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_options: Any) -> tuple[Tensor, Tensor]:
        """Write the new tokens' keys and values behind the others, and return all of them."""
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._memory is None:
            self.lazy_initialization(key_states, value_states)
            keys, values = (
                new.new_empty(*new.shape[:2], self._length, new.shape[-1]) for new in (key_states, value_states)
            )
            self._memory = keys, values
        for memory, new in zip(self._memory, (key_states, value_states), strict=True):
            memory[:, :, start:end] = new
        self._show(end)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows, each as often as it is named."""
        length = self.get_seq_length()
        if self._memory is not None:
            keys, values = (memory.index_select(0, beam_idx) for memory in self._memory)
            self._memory = keys, values
            self._show(length)

    def _show(self, length: int) -> None:
        assert self._memory is not None
        self.keys, self.values = (memory[:, :, :length] for memory in self._memory)


def reserve_cache(config: Any, length: int) -> DynamicCache:
    """Return an empty cache for sequences of this length.

    Layers of other kinds (sliding windows, states of linear attention) stay as transformers makes them.
    """
    cache = DynamicCache(config=config)
    cache.layers = [_ReservedLayer(length) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache

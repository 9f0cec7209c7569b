"""What lies in Gemini's chunks, whole and by the weights' names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_core.strategy.colossal.compat.gemini import ShardedModel, chunks_of, current_device, rest


class Share(NamedTuple):
    """Where this rank's part of a weight is."""

    in_shard: slice
    """Of this rank's shard of the chunk."""
    in_weight: slice
    """Of the flat weight; empty if all of it is on other ranks."""


class Chunks:
    """The chunks of one model: of working weights, and where there are any, the masters' in pairs with them.

    Args:
        model: at rest where its chunks are read or written; every method that gathers is called by all ranks.
    """

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self._name_of: Mapping[Any, str] = model.param2name
        self._weight_of = {name: weight for weight, name in self._name_of.items()}
        self.device = current_device()

    def rest(self) -> None:
        """Let each rank have its shards alone, whatever pass was made or broken off."""
        rest(self._model)

    def of(self, name: str) -> Any:
        """Return the chunk that a weight lies in."""
        return self._model.chunk_manager.get_chunk(self._weight_of[name])

    def names(self) -> list[str]:
        """Return the names of all weights, tied ones once."""
        return list(self._weight_of)

    def share(self, name: str) -> Share:
        """Return where this rank's part of a weight is, in chunks of any kind."""
        chunk = self.of(name)
        place = chunk.tensors_info[self._weight_of[name]]
        start, end = max(place.offset, chunk.shard_begin), min(place.end, chunk.shard_end)
        end = max(start, end)
        return Share(
            slice(start - chunk.shard_begin, end - chunk.shard_begin), slice(start - place.offset, end - place.offset)
        )

    def empty_shard(self, chunk: Any) -> Tensor:
        """Return zeros, of float32, in the shape of a rank's shard."""
        return torch.zeros(chunk.shard_size, device=self.device)

    def gathered(self, chunk: Any, shard: Tensor) -> dict[str, Tensor]:
        """Return, on the device, whole tensors by the names of a chunk's weights: views of what all shards make up.

        Args:
            chunk: says what is where.
            shard: this rank's.
        """
        everything = torch.empty(chunk.chunk_size, dtype=shard.dtype, device=self.device)
        dist.all_gather_single(everything, shard.to(self.device), group=chunk.torch_pg)
        return {
            self._name_of[weight]: everything[place.offset : place.end].view(weight.shape)
            for weight, place in chunk.tensors_info.items()
        }

    def working(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that passes use, gathered chunk by chunk."""
        for chunk in chunks_of(self._model):
            # An offloaded share may be older than its master, from which the next pass would take it.
            source = chunk if chunk.optim_sync_flag else chunk.paired_chunk
            yield from self.gathered(chunk, source.payload.to(chunk.dtype)).items()

    def exact(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of these names in float32, gathered chunk by chunk."""
        for chunk in dict.fromkeys(self.of(name) for name in names):
            source = chunk if chunk.paired_chunk is None else chunk.paired_chunk
            whole = self.gathered(chunk, source.payload)
            yield from ((name, tensor) for name, tensor in whole.items() if name in names)

    def load(self, name: str, weight: Tensor) -> None:
        """Take this rank's part of a whole weight, as it is used and as it is kept."""
        chunk, share = self.of(name), self.share(name)
        for target in (chunk, chunk.paired_chunk):
            if target is not None:
                target.payload[share.in_shard].copy_(weight.reshape(-1)[share.in_weight])

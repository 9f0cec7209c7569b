"""What leaves a strategy: a whole model as its own library loads it, or its tensors shard by shard."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.errors import ModelError
from rlhf_core.models.adapters import save_adapters
from rlhf_core.models.lora import save_merged

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MB = 1024 * 1024


def write_pretrained(
    model: nn.Module, directory: Path, tokenizer: PreTrainedTokenizerBase | None = None, *, merge_adapters: bool = True
) -> None:
    """Write a directory that the model's own `from_pretrained` loads; or adapters alone, in peft's format.

    Raises:
        ModelError: if the model has no such form.
    """
    save: Any = getattr(model, "save_pretrained", None)
    is_transformers = isinstance(model, PreTrainedModel)
    if save is None or not (merge_adapters or is_transformers):
        raise ModelError(
            f"a {type(model).__name__} is not written {'' if merge_adapters else 'with its adapters apart '}by "
            "save_pretrained; use save_model, which writes all weights under their own names"
        )
    if is_transformers:
        save = partial(save_merged if merge_adapters else save_adapters, model)
    save(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def in_shards(model: nn.Module, *, trained_only: bool, shard_mb: float | None) -> Iterator[dict[str, Tensor]]:
    """Yield copies of a model's tensors in host memory, by name; tied weights once.

    Args:
        model: on this rank, whole.
        trained_only: leave out what needs no gradient.
        shard_mb: a shard is yielded once it has so many megabytes; None yields all in one.
    """
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in _tensors(model, trained_only):
        shard[name] = tensor.detach().to("cpu", copy=True)
        size += shard[name].nbytes
        if shard_mb is not None and size >= shard_mb * _MB:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _tensors(model: nn.Module, trained_only: bool) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not trained_only:
            yield name, parameter
    lasting = {} if trained_only else model.state_dict()
    for name, buffer in model.named_buffers():
        if name in lasting:
            yield name, buffer

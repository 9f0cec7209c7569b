"""Writes models as small shards of safetensors; nothing appears on the terminal."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SHARD_SIZE = "64MB"  # the unit of sharing and of parallel transfer in the artifact store
SHARD_BYTES = 64 * 10**6
"""The same as a number."""
T = TypeVar("T")


def in_shards(items: Iterable[T], size_of: Callable[[T], int], *, most: int) -> list[list[T]]:
    """Return items by shard, in their order: a shard ends before what would make it larger than `most` bytes.

    A larger item has a shard of its own; of nothing, one shard is made.
    """
    shards: list[list[T]] = [[]]
    filled = 0
    for item in items:
        size = size_of(item)
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += size
    return shards


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and warnings off the terminal, and put them back as they were."""
    bars = transformers_logging.is_progress_bar_enabled()
    level = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write model and tokenizer as `AutoModelForCausalLM` and `AutoTokenizer` load them, in shards of 64 MB."""
    with quiet():
        model.save_pretrained(directory, max_shard_size=SHARD_SIZE)
        tokenizer.save_pretrained(directory)


def save_weights(
    config: PreTrainedConfig,
    weights: Mapping[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
) -> None:
    """Write named weights as the model of a configuration; the tensors are not copied.

    Args:
        config: of a causal language model.
        weights: all of its weights by name; tied ones may be left out.
        tokenizer: goes beside them.
        directory: is made if it is not there.

    Raises:
        ValueError: if a weight is missing or is none of the model's.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    still_missing = [name for name in missing if model.state_dict()[name].is_meta]
    if still_missing or unexpected:
        raise ValueError(f"weights do not fit the model: missing {still_missing}, unexpected {list(unexpected)}")
    save_model(model, tokenizer, directory)

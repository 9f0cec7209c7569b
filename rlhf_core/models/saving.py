"""Writes models as small shards of safetensors; nothing appears on the terminal."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SHARD_SIZE = "64MB"  # the unit of sharing and of parallel transfer in the artifact store
SHARD_BYTES = 64 * 10**6
"""The same as a number."""


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

"""What every buffer's sizes must be."""

from __future__ import annotations

from rlhf_core.errors import ConfigError


def check_sizes(sample_batch_size: int, limit: int) -> None:
    """See that a buffer can hand out batches and hold something.

    Args:
        sample_batch_size: samples of a batch.
        limit: of what may wait; 0 sets none.

    Raises:
        ConfigError: if a batch has less than one sample, or the limit is below 0.
    """
    if sample_batch_size < 1 or limit < 0:
        raise ConfigError(
            f"expected a buffer with sample_batch_size of at least 1 and limit of at least 0, got {sample_batch_size} "
            f"and {limit}"
        )

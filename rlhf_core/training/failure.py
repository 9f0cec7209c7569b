"""What an error says of the data that it arose from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlhf_core.errors import TrainingError


def with_place(error: Exception, write: Callable[[Path], object], place: Path, *, what: str) -> TrainingError:
    """Keep what training failed on, and return the error that says where; or, as one may not hide the other, why not.

    Args:
        error: what was wrong.
        write: keeps the data in the place that it is given.
        place: a file or a directory.
        what: names the data.
    """
    try:
        write(place)
    except Exception as failure:  # a full disk is an OSError to Python, and a SafetensorError to safetensors
        return TrainingError(f"{error}; the {what} could not be kept in {place} ({failure})")
    return TrainingError(f"{error}; the {what} is kept in {place}")

"""A run's directory: can it be written, which checkpoints are in it, and where is a failed batch kept?

Imports no torch: a command line is checked in a moment.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from rlhf_core.errors import ConfigError, TrainingError

TRAINER = "trainer"
"""The role whose directory makes a checkpoint one: it is written last."""
_NAME = re.compile(r"epoch-(\d+)_step-(\d+)")


def checkpoint_name(*, episode: int, step: int) -> str:
    """Return coati's name of a checkpoint."""
    return f"epoch-{episode}_step-{step}"


def checkpoint_place(name: str) -> tuple[int, int] | None:
    """Return the step and episode of a checkpoint's name, of which the larger is the later; None for another name.

    Example:
        >>> checkpoint_place("epoch-1_step-20"), checkpoint_place("modeling")
        ((20, 1), None)
    """
    match = _NAME.fullmatch(name)
    return (int(match[2]), int(match[1])) if match else None


def checkpoint_names(save_dir: Path) -> list[str]:
    """Return the names of a run's checkpoints by step, whole or not; all have the trainer's directory."""
    names = (path.name for path in (save_dir / TRAINER).glob("epoch-*"))
    placed = [(place, name) for name in names if (place := checkpoint_place(name)) is not None]
    return [name for _, name in sorted(placed)]


def check_writable(directory: Path, *, what: str) -> None:
    """Make a directory with its parents, and check that files can be written in it.

    Args:
        directory: to write in.
        what: the parameter that names it, for the message.

    Raises:
        ConfigError: if it is a file, or cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"0")
    except OSError as error:
        raise ConfigError(
            f"{what} is {directory}, where nothing can be written ({error.strerror or error}); give a directory that "
            "this user may write in"
        ) from error


def check_no_other_run(save_dir: Path, *, what: str, way_on: Callable[[str], str]) -> None:
    """Check that a directory holds no checkpoints.

    Args:
        save_dir: for those of a new run.
        what: the parameter that names it, for the message.
        way_on: what goes on with a run, from the name of its last checkpoint; for the message.

    Raises:
        ConfigError: if there are some.
    """
    if names := checkpoint_names(save_dir):
        raise ConfigError(
            f"{what} {save_dir} holds checkpoints of an earlier run, up to {names[-1]}; give another one, or go on "
            f"with that run by {way_on(names[-1])}"
        )


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

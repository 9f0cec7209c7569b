"""A run's directories: that they can be written, and, of checkpoints, whose they are and of which branch of the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from rlhf_core.strategy.ranks import Ranks, together
from rlhf_core.training.checkpoint import Checkpoint, Writer, list_checkpoints, write_checkpoint
from rlhf_core.training.run_directory import TRAINER, check_no_other_run, check_writable
from rlhf_core.training.tracking import Tracker, check_tracking, open_tracker

logger = logging.getLogger(__name__)

_ABANDONED = "abandoned-"


def make_writable(directory: Path, *, what: str, ranks: Ranks) -> None:
    """Make a directory, and see that every rank can write in it; called by all ranks together.

    Args:
        directory: with its parents.
        what: the parameter that names it, for the message.
        ranks: who trains together.

    Raises:
        ConfigError: if it is a file, or cannot be written.
    """
    together(ranks, lambda: check_writable(directory, what=what), what=f"write in {what}")


def open_log(log_dir: str | Path | None, name: str, use_wandb: bool, ranks: Ranks) -> Tracker:
    """Return the tracker of a run, which on all ranks but the first drops everything; called by all ranks together.

    Args:
        log_dir: None drops everything.
        name: of the kind of run.
        use_wandb: as for `open_tracker`.
        ranks: who trains together.

    Raises:
        ConfigError: if metrics cannot go where they are asked to go.
    """
    check_tracking(log_dir, use_wandb=use_wandb)
    if log_dir is not None:
        make_writable(Path(log_dir), what="log_dir", ranks=ranks)

    def begin() -> Tracker:
        return open_tracker(log_dir, name, use_wandb) if ranks.is_first else Tracker()

    return together(ranks, begin, what="open its log")


class SaveDir:
    """Where a run's checkpoints go; every method is called by all ranks.

    Args:
        path: None keeps none.
        ranks: who trains together.
    """

    def __init__(self, path: Path | None, ranks: Ranks) -> None:
        self._path = path
        self._ranks = ranks
        self._last: tuple[int, int] | None = None
        """Place of the checkpoint in here that the run has written, or goes on from."""
        self._branches = False

    def prepare(self) -> None:
        """See, before a fit, that checkpoints can be written, and not among those of another run.

        Raises:
            ConfigError: if nothing can be written there, or there are checkpoints that this run neither wrote nor
                goes on from.
        """
        path = self._path
        if path is None:
            return
        make_writable(path, what="save_dir", ranks=self._ranks)

        def check() -> None:
            if self._last is None:
                check_no_other_run(path, what="save_dir", way_on=lambda _: "load_checkpoint")

        together(self._ranks, check, what="begin in save_dir")

    def goes_on_from(self, checkpoint: Checkpoint) -> None:
        """Take note of the checkpoint that was loaded, from this directory or another."""
        here = self._path is not None and checkpoint.save_dir.resolve() == self._path.resolve()
        self._last = checkpoint.place if here else None
        self._branches = here

    def holds(self, step: int) -> bool:
        """Whether the run has its checkpoint of this step, or none is to be kept."""
        return self._path is None or (self._last is not None and self._last[0] == step)

    def write(self, name: str, writers: Mapping[str, Writer]) -> None:
        """Write one checkpoint; before the first after going on from an earlier one, set the later ones aside.

        Args:
            name: from `checkpoint_name`.
            writers: as for `write_checkpoint`.

        Raises:
            TrainingError: if it could not be written; earlier ones are as they were.
        """
        if self._path is None:
            return
        if self._branches:
            together(self._ranks, self._abandon_later, what="set the abandoned checkpoints aside")
            self._branches = False
        self._last = write_checkpoint(self._path, name, writers, self._ranks).place

    def _abandon_later(self) -> None:
        """Rename the checkpoints of the branch that is left, the trainer's directory first: without it, there is none.

        Done before anything is written: a process that dies in between leaves what the run went on from as the latest.
        """
        if self._path is None or self._last is None or not self._ranks.is_first:
            return
        for checkpoint in list_checkpoints(self._path):
            if checkpoint.place <= self._last:
                continue
            others = [self._path / checkpoint.name, *self._path.glob(f"*/{checkpoint.name}")]
            first = checkpoint.path(TRAINER)
            for path in (first, *(path for path in others if path != first and path.is_dir())):
                path.rename(_free(path.with_name(f"{_ABANDONED}{checkpoint.name}")))
            logger.warning(
                "the run went on from an earlier checkpoint, so %s of %s is set aside as %s%s",
                checkpoint.name,
                self._path,
                _ABANDONED,
                checkpoint.name,
            )


def _free(path: Path) -> Path:
    """Return the path, with a number behind it if there is one of this name."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free

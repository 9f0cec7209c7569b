"""The directories of a command line: those that must be there, and those that can be written to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.errors import ConfigError
from rlhf_core.training.run_directory import TRAINER, check_no_other_run, check_writable, checkpoint_place

if TYPE_CHECKING:
    from argparse import Namespace


def check_places(args: Namespace) -> None:
    """See that what is read is there, and make what is written to.

    Raises:
        ConfigError: naming the flag, if a directory is missing, cannot be written to, or holds another run.
    """
    for name in ("tokenizer_dir", "rm_checkpoint_path"):
        path = getattr(args, name)
        if path and not Path(path).is_dir():
            raise ConfigError(f"--{name} {path} is not a directory")
    _check_no_other_run(args)
    for name in ("save_path", "log_dir"):
        if path := getattr(args, name):
            check_writable(Path(path), what=f"--{name}")


def checkpoint_step(args: Namespace) -> Path | None:
    """Return the trainer's part of the checkpoint to go on from; None for a new run.

    Raises:
        ConfigError: if one of the two paths is missing, or they are not of one step of one run.
    """
    actor, critic = args.checkpoint_path, args.critic_checkpoint_path
    if not actor and not critic:
        return None
    if not (actor and critic):
        raise ConfigError("--checkpoint_path and --critic_checkpoint_path go together: give both or neither")
    for flag, path in (("--checkpoint_path", actor), ("--critic_checkpoint_path", critic)):
        if not Path(path).is_dir():
            raise ConfigError(f"{flag} {path} is not a directory")
        if checkpoint_place(Path(path).name) is None:
            raise ConfigError(f"{flag} {path} is no checkpoint; its directory's name should be like epoch-1_step-20")
    actor, critic = Path(actor).resolve(), Path(critic).resolve()
    if actor.name != critic.name or actor.parent.parent != critic.parent.parent:
        raise ConfigError(
            f"--checkpoint_path is {actor.name} of {actor.parent.parent} and --critic_checkpoint_path {critic.name} of "
            f"{critic.parent.parent}; give one step of one run"
        )
    trainer = actor.parent.parent / TRAINER / actor.name
    if not trainer.is_dir():
        raise ConfigError(f"{actor} has no {trainer} beside it, so it is not a whole checkpoint; give an earlier one")
    return trainer


def _check_no_other_run(args: Namespace) -> None:
    """Allow the checkpoints of the run that is gone on with: one that goes on elsewhere may not mix with another."""
    root, step = Path(args.save_path), checkpoint_step(args)
    if step is not None and step.parent.parent == root.resolve():
        return

    def way_on(name: str) -> str:
        return f"--checkpoint_path {root / 'actor' / name} --critic_checkpoint_path {root / 'critic' / name}"

    check_no_other_run(root, what="--save_path", way_on=way_on)

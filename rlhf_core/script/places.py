"""The directories of a command line: those that must be there, and those that can be written to."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from argparse import Namespace

CHECKPOINT_NAME = re.compile(r"epoch-(\d+)_step-(\d+)")


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
            _check_writable(name, Path(path))


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
        if not CHECKPOINT_NAME.fullmatch(Path(path).name):
            raise ConfigError(f"{flag} {path} is no checkpoint; its directory's name should be like epoch-1_step-20")
    actor, critic = Path(actor).resolve(), Path(critic).resolve()
    if actor.name != critic.name or actor.parent.parent != critic.parent.parent:
        raise ConfigError(
            f"--checkpoint_path is {actor.name} of {actor.parent.parent} and --critic_checkpoint_path {critic.name} of "
            f"{critic.parent.parent}; give one step of one run"
        )
    trainer = actor.parent.parent / "trainer" / actor.name
    if not trainer.is_dir():
        raise ConfigError(f"{actor} has no {trainer} beside it, so it is not a whole checkpoint; give an earlier one")
    return trainer


def _check_no_other_run(args: Namespace) -> None:
    root = Path(args.save_path)
    if args.checkpoint_path or not (root / "trainer").is_dir():
        return
    found = [match for path in (root / "trainer").iterdir() if (match := CHECKPOINT_NAME.fullmatch(path.name))]
    if found:
        last = max(found, key=lambda match: int(match[2]))[0]
        raise ConfigError(
            f"--save_path {root} holds checkpoints of an earlier run, up to {last}; give another one, or go on with "
            f"that run by --checkpoint_path {root / 'actor' / last} "
            f"--critic_checkpoint_path {root / 'critic' / last}"
        )


def _check_writable(name: str, path: Path) -> None:
    if path.is_file():
        raise ConfigError(f"--{name} {path} is a file; give a directory")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as stream:
            stream.write(b"0")
    except OSError as error:
        raise ConfigError(f"--{name} {path} cannot be written to: {error.strerror}; give another directory") from error

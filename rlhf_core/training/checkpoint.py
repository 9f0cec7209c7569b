"""Checkpoints on disk: written whole or not at all, in the layout that coati's trainers read.

    save_dir/<role>/epoch-E_step-S/...          role: actor, critic, trainer
    save_dir/trainer/epoch-E_step-S/manifest.json   size and checksum of every file; without it, no checkpoint

Everything is written under other names, and flushed to the disk; then the directories get their names, the trainer's
last. `SaveDir` knows in addition which checkpoints are the run's own. ADR 14 says what a bit-exact continuation needs.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_core.errors import ModelError, TrainingError
from rlhf_core.strategy.ranks import Ranks, together
from rlhf_core.training.run_directory import (
    TRAINER,
    check_no_other_run,
    check_writable,
    checkpoint_names,
    checkpoint_place,
)

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_WRITING, _REPLACED, _ABANDONED = ".writing-", ".replaced-", "abandoned-"

Writer = Callable[[Path], None]


class Checkpoint(NamedTuple):
    """A checkpoint that has a manifest."""

    save_dir: Path
    name: str

    @property
    def place(self) -> tuple[int, int]:
        """Its step and episode: the larger, the later."""
        place = checkpoint_place(self.name)
        if place is None:
            raise ValueError(f"{self.name!r} is no checkpoint's name")
        return place

    def path(self, role: str) -> Path:
        """Return the directory of a role's files."""
        return self.save_dir / role / self.name


def write_checkpoint(save_dir: Path, name: str, writers: Mapping[str, Writer], ranks: Ranks) -> Checkpoint:
    """Write one checkpoint; called by all ranks together.

    Args:
        save_dir: is made if it is not there; the same for all ranks.
        name: from `checkpoint_name`.
        writers: by role, the trainer's included; each fills the directory that it is given, and is called on every
            rank.
        ranks: who trains together.

    Raises:
        TrainingError: on all ranks, if anything could not be written; earlier checkpoints are as they were.
    """
    held = {role: save_dir / role / f"{_WRITING}{name}" for role in writers}

    def prepare() -> None:
        _make_room(held.values())

    def fill() -> None:
        for role, writer in writers.items():
            writer(held[role])

    def publish() -> None:
        _publish(save_dir, name, held)

    try:
        together(ranks, prepare if ranks.is_first else _wait, what="prepare the checkpoint")
        together(ranks, fill, what="write its part of the checkpoint")
        together(ranks, publish if ranks.is_first else _wait, what="finish the checkpoint")
    except Exception as error:
        if ranks.is_first:
            for directory in held.values():
                shutil.rmtree(directory, ignore_errors=True)
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise TrainingError(
            f"the checkpoint {name} could not be written to {save_dir} ({reason}); earlier ones are as they were: "
            "make room, and go on from the last one with load_checkpoint"
        ) from error
    return Checkpoint(save_dir, name)


def find_checkpoint(directory: str | Path) -> Checkpoint:
    """Return the checkpoint of a directory, its files all there and unchanged.

    Args:
        directory: a `save_dir`, of which the latest whole checkpoint is taken, or a checkpoint's own directory
            under one of the roles.

    Raises:
        ModelError: if there is none that is whole; the message says what is wrong with it.
    """
    given = Path(directory).resolve()  # from inside a checkpoint, "." has neither name nor parent
    if checkpoint_place(given.name) is not None:
        found = Checkpoint(given.parent.parent, given.name)
        if (damage := damage_of(found)) is not None:
            raise ModelError(f"the checkpoint {given} is not whole: {damage}; take another one, or leave it out")
        return found
    faults = []
    for found in reversed(list_checkpoints(given)):
        if (damage := damage_of(found)) is None:
            return found
        faults.append(f"{found.name}: {damage}")
        logger.warning("the checkpoint %s is passed over, as it is not whole: %s", found.path(TRAINER), damage)
    detail = f" ({'; '.join(faults)})" if faults else ""
    raise ModelError(f"{given} holds no whole checkpoint{detail}; give the save_dir of an earlier run")


def list_checkpoints(save_dir: Path) -> list[Checkpoint]:
    """Return the checkpoints of a run by step, whole or not; all have the trainer's directory."""
    return [Checkpoint(save_dir, name) for name in checkpoint_names(save_dir)]


def damage_of(checkpoint: Checkpoint) -> str | None:
    """Return what is wrong with a checkpoint's files; None if they are as they were written."""
    manifest = checkpoint.path(TRAINER) / MANIFEST
    try:
        files = json.loads(manifest.read_text())["files"]
    except (OSError, ValueError, KeyError):
        return f"{manifest.name} is missing or cannot be read, so it was never finished"
    for name, entry in files.items():
        path = checkpoint.save_dir / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
        if _digest(path) != entry["sha256"]:
            return f"{name} has changed since it was written"
    return None


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
        """Check, before a fit, that checkpoints can be written, and not among those of another run.

        Raises:
            ConfigError: if nothing can be written there, or there are checkpoints that this run neither wrote nor
                goes on from.
        """
        path = self._path
        if path is None:
            return
        together(self._ranks, lambda: check_writable(path, what="save_dir"), what="write in save_dir")

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


def training_form(optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return what an optimizer's and a schedule's stored state must agree with, as JSON holds it."""
    state = scheduler.state_dict()
    sizes = getattr(optimizer, "group_sizes", None)  # of another's optimizer only what is in its groups is known
    return {
        "groups": [len(group["params"]) for group in optimizer.param_groups] if sizes is None else sizes,
        "schedule": sorted(state.keys() - {"lr_lambdas"}),
        "rates": len(state.get("_last_lr", ())),
    }


def check_training_form(stored: Mapping[str, Any], own: Mapping[str, Any], *, where: Path) -> None:
    """Check that optimizer and schedule were built as for the run that wrote the checkpoint, before anything is loaded.

    Args:
        stored: what `training_form` returned then.
        own: what it returns now.
        where: the checkpoint.

    Raises:
        ModelError: if they differ.
    """
    for name, what in (
        ("groups", "numbers of weights in the optimizer's groups"),
        ("schedule", "numbers in the schedule's state"),
        ("rates", "number of learning rates"),
    ):
        if stored.get(name) != own[name]:
            raise ModelError(
                f"the checkpoint {where} has {stored.get(name)} as {what}, but this run has {own[name]}; build "
                "model, optimizer and schedule as the run did that wrote it"
            )


def write_json(path: Path, content: Any) -> None:
    """Write JSON that a person can read."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _make_room(directories: Iterable[Path]) -> None:
    """Make the directories to write in, and remove what a process left that died."""
    for directory in directories:
        for mark in (_WRITING, _REPLACED):
            for left in directory.parent.glob(f"{mark}*"):
                shutil.rmtree(left)
        directory.mkdir(parents=True)


def _wait() -> None:
    """Leave the work to the first rank."""


def _publish(save_dir: Path, name: str, held: Mapping[str, Path]) -> None:
    """Give everything its name, the trainer's directory last: with that, the checkpoint is there."""
    files: dict[str, dict[str, Any]] = {}
    for role, directory in held.items():
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                _flush(path)
                entry = {"bytes": path.stat().st_size, "sha256": _digest(path)}
                files[f"{role}/{name}/{path.relative_to(directory).as_posix()}"] = entry
        for path in (directory, *directory.rglob("*")):
            if path.is_dir():
                _flush(path)
    write_json(held[TRAINER] / MANIFEST, {"files": files})
    _flush(held[TRAINER] / MANIFEST)
    _flush(held[TRAINER])
    order = [*(role for role in held if role != TRAINER), TRAINER]
    replaced = _set_aside(save_dir, name, [TRAINER, *order[:-1]])
    for role in order:
        held[role].rename(save_dir / role / name)
        _flush(save_dir / role)
    for path in replaced:
        shutil.rmtree(path)


def _set_aside(save_dir: Path, name: str, roles: Sequence[str]) -> list[Path]:
    """Rename what has this name already: left by a run that was continued from an earlier checkpoint."""
    moved = []
    for role in roles:
        path, aside = save_dir / role / name, save_dir / role / f"{_REPLACED}{name}"
        shutil.rmtree(aside, ignore_errors=True)
        if path.exists():
            moved.append(path.rename(aside))
    return moved


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Checkpoints of a supervised trainer: coati's layout, and what a continuation to the bit needs besides.

save_dir/epoch-E_step-S/{modeling,optimizer,lr_scheduler,running_states.json}
save_dir/trainer/epoch-E_step-S/{rank-R.safetensors,rank-R.json,manifest.json}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_core.errors import ModelError
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.trainer.checkpoint import check_training_form, find_checkpoint, training_form, write_json
from rlhf_core.trainer.loaders import LoaderState
from rlhf_core.trainer.named_tensors import prefixed, under
from rlhf_core.trainer.optim import Trained
from rlhf_core.trainer.run_directory import TRAINER, checkpoint_name, checkpoint_place
from rlhf_core.trainer.save_dir import SaveDir

MODEL = "."  # coati's supervised trainers keep one model, whose files are in save_dir itself
_RANDOM, _LOADER = "random", "loader"


class Position(NamedTuple):
    """Where a rank stands in its run."""

    epoch: int
    """From 0."""
    step: int
    """Optimizer steps taken in the run."""
    samples: int
    """Samples of the epoch that this rank has seen."""
    loader: LoaderState
    random: dict[str, Tensor]


def write_supervised(save_dir: SaveDir, trained: Trained, position: Position, ranks: Ranks) -> None:
    """Write one checkpoint, whole or not at all, unless the step has one; called by all ranks together.

    Raises:
        TrainingError: if it could not be written; earlier ones are as they were.
    """
    if save_dir.holds(position.step):
        return

    def write_model(directory: Path) -> None:
        booster = trained.booster
        booster.save_model(trained.model, str(directory / "modeling"), shard=True, use_safetensors=True)
        booster.save_optimizer(trained.optimizer, str(directory / "optimizer"), shard=True)
        booster.save_lr_scheduler(trained.scheduler, str(directory / "lr_scheduler"))
        if ranks.is_first:
            states = {"epoch": position.epoch, "step": position.step, "sample_start_index": position.samples}
            write_json(directory / "running_states.json", states)

    def write_rank(directory: Path) -> None:
        named = prefixed(_RANDOM, position.random) | prefixed(_LOADER, position.loader.tensors)
        save_file({name: tensor.contiguous() for name, tensor in named.items()}, directory / _rank_file(ranks))
        form = training_form(trained.optimizer, trained.scheduler)
        facts = {"ranks": ranks.world_size, "loader": position.loader.facts, "form": form}
        write_json((directory / _rank_file(ranks)).with_suffix(".json"), facts)

    name = checkpoint_name(episode=position.epoch, step=position.step)
    save_dir.write(name, {MODEL: write_model, TRAINER: write_rank})


def read_supervised(directory: Path, trained: Trained, ranks: Ranks, save_dir: SaveDir) -> Position:
    """Put back model, optimizer and schedule; return where this rank stood.

    Args:
        directory: a `save_dir`, or one checkpoint's directory in it.
        trained: built as for the run that wrote it.
        ranks: who trains together; as many as wrote it.
        save_dir: of this run, which is told where it goes on from.

    Raises:
        ModelError: if it is not whole, or of another form; nothing was changed.
    """
    directory = directory.resolve()
    if checkpoint_place(directory.name) is not None and directory.parent.name != TRAINER:
        directory = directory.parent / TRAINER / directory.name
    found = find_checkpoint(directory)
    files = found.path(MODEL)
    states = json.loads((files / "running_states.json").read_text())
    own = found.path(TRAINER) / _rank_file(ranks)
    facts: dict[str, Any] = {"ranks": "fewer"}
    if own.is_file():
        facts = json.loads(own.with_suffix(".json").read_text())
    if facts["ranks"] != ranks.world_size:
        raise ModelError(
            f"the checkpoint {files} was written by {facts['ranks']} ranks, but {ranks.world_size} go on; start as "
            "many, or begin anew from its modeling"
        )
    form = facts.get("form")
    own_form = training_form(trained.optimizer, trained.scheduler)
    check_training_form(form if isinstance(form, Mapping) else {}, own_form, where=files)
    trained.booster.load_model(trained.model, str(files / "modeling"))
    trained.booster.load_optimizer(trained.optimizer, str(files / "optimizer"))
    trained.booster.load_lr_scheduler(trained.scheduler, str(files / "lr_scheduler"))
    tensors = load_file(own)
    save_dir.goes_on_from(found)
    loader = LoaderState(facts["loader"], under(_LOADER, tensors))
    return Position(states["epoch"], states["step"], states["sample_start_index"], loader, under(_RANDOM, tensors))


def _rank_file(ranks: Ranks) -> str:
    return f"rank-{ranks.rank}.safetensors"

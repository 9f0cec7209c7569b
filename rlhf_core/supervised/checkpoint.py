"""Checkpoints of a supervised trainer: coati's layout, and what a continuation to the bit needs besides.

save_dir/epoch-E_step-S/{modeling,optimizer,lr_scheduler,running_states.json}
save_dir/trainer/epoch-E_step-S/{rank-R.safetensors,rank-R.json,manifest.json}
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_core.errors import ModelError
from rlhf_core.strategy.ranks import Ranks
from rlhf_core.training.checkpoint import Checkpoint, check_training_form, find_checkpoint, training_form, write_json
from rlhf_core.training.loaders import CycledLoader, Dealt, LoaderState, dealt_by_all
from rlhf_core.training.named_tensors import prefixed, under
from rlhf_core.training.optim import Trained
from rlhf_core.training.random_state import set_random_states
from rlhf_core.training.run_directory import TRAINER, checkpoint_name, checkpoint_place
from rlhf_core.training.save_dir import SaveDir

logger = logging.getLogger(__name__)

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
    """Empty for a rank that the checkpoint knows nothing of: it keeps its own."""
    dealt: Dealt | None = None
    """By all ranks, where another number of them goes on than wrote the checkpoint."""

    def resume(self, loader: CycledLoader, ranks: Ranks) -> None:
        """Put the loader and the random states where they were."""
        if self.dealt is None:
            loader.load_state(self.loader.facts, self.loader.tensors)
        else:
            loader.load_dealt(self.dealt, self.loader.tensors, ranks.world_size)
        if self.random:
            set_random_states(self.random)


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
        save_file({name: tensor.contiguous() for name, tensor in named.items()}, directory / _rank_file(ranks.rank))
        form = training_form(trained.optimizer, trained.scheduler)
        facts = {"ranks": ranks.world_size, "loader": position.loader.facts, "form": form}
        write_json((directory / _rank_file(ranks.rank)).with_suffix(".json"), facts)

    name = checkpoint_name(episode=position.epoch, step=position.step)
    save_dir.write(name, {MODEL: write_model, TRAINER: write_rank})


def read_supervised(directory: Path, trained: Trained, ranks: Ranks, save_dir: SaveDir) -> Position:
    """Put back model, optimizer and schedule; return where this rank stood.

    Args:
        directory: a `save_dir`, or one checkpoint's directory in it.
        trained: built as for the run that wrote it.
        ranks: who trains together; with more or fewer than wrote it, loaders go on behind as many samples of all.
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
    stored = int(_facts(found, 0)["ranks"])
    is_fresh = ranks.rank >= stored
    rank = 0 if is_fresh else ranks.rank
    facts, tensors = _facts(found, rank), load_file(found.path(TRAINER) / _rank_file(rank))
    dealt = None
    if stored != ranks.world_size:
        dealt = dealt_by_all([_facts(found, each)["loader"] for each in range(stored)])
    form = facts.get("form")
    own_form = training_form(trained.optimizer, trained.scheduler)
    check_training_form(form if isinstance(form, Mapping) else {}, own_form, where=files)
    trained.booster.load_model(trained.model, str(files / "modeling"))
    trained.booster.load_optimizer(trained.optimizer, str(files / "optimizer"))
    trained.booster.load_lr_scheduler(trained.scheduler, str(files / "lr_scheduler"))
    save_dir.goes_on_from(found)
    if dealt is not None and ranks.is_first:
        logger.warning(
            "the checkpoint %s is of %d ranks, and %d go on: loaders behind the %d samples that all ranks had dealt",
            found.name, stored, ranks.world_size, dealt.samples,
        )  # fmt: skip
    loader = LoaderState(facts["loader"], under(_LOADER, tensors))
    random = {} if is_fresh else under(_RANDOM, tensors)
    return Position(states["epoch"], states["step"], states["sample_start_index"], loader, random, dealt)


def _facts(checkpoint: Checkpoint, rank: int) -> dict[str, Any]:
    """Return what a rank wrote beside its tensors.

    Raises:
        ModelError: if it wrote nothing.
    """
    path = (checkpoint.path(TRAINER) / _rank_file(rank)).with_suffix(".json")
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is no state of a supervised trainer; give a checkpoint that fit wrote") from error
    return facts


def _rank_file(rank: int) -> str:
    return f"rank-{rank}.safetensors"

"""What `SFTTrainer` and `RewardModelTrainer` have in common: epochs over a dataloader, metrics, and checkpoints.

A checkpoint is in coati's layout, with what a continuation to the bit needs besides:

    save_dir/epoch-E_step-S/{modeling,optimizer,lr_scheduler,running_states.json}
    save_dir/trainer/epoch-E_step-S/{rank-R.safetensors,rank-R.json,manifest.json}
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlhf_core.errors import ConfigError, DataError, ModelError, TrainingError
from rlhf_core.models.compatibility import vocabulary_size
from rlhf_core.models.trunk import device_of
from rlhf_core.strategy.booster import Booster
from rlhf_core.strategy.ranks import Ranks, current_ranks, together
from rlhf_core.supervised.step import Objective, supervised_step
from rlhf_core.training.boosted import rounds
from rlhf_core.training.checkpoint import (
    Checkpoint,
    SaveDir,
    check_training_form,
    find_checkpoint,
    training_form,
    write_json,
)
from rlhf_core.training.loaders import CycledLoader, LoaderProgress, LoaderState, is_one_shot, progress_of_all
from rlhf_core.training.modes import random_states, set_random_states
from rlhf_core.training.optim import Metrics, Trained
from rlhf_core.training.run_directory import TRAINER, checkpoint_name, checkpoint_place, with_place
from rlhf_core.training.state import prefixed, under
from rlhf_core.training.tracking import Tracker, open_log

logger = logging.getLogger(__name__)

MODEL = "."  # coati's supervised trainers keep one model, whose files are in save_dir itself
_RANDOM, _LOADER = "random", "loader"

Batch = Mapping[str, Any]
Micro = TypeVar("Micro", bound=tuple[Any, ...])


class PassLoader(CycledLoader):
    """A loader that is gone through once at a time."""

    def rest_of_pass(self, number: int) -> Iterator[Batch]:
        """Yield the batches of pass `number` that were not given yet: all of them, unless a state was loaded."""
        if self._pass != number:
            self._begin_pass(number)
        for batch in self._iterator:
            self._count(batch)
            yield batch


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
    progress: LoaderProgress | None = None
    """By all ranks, where another number of them goes on than wrote the checkpoint."""

    def resume(self, loader: CycledLoader, ranks: Ranks) -> None:
        """Put the loader and the random states where they were."""
        if self.progress is None:
            loader.load_state(self.loader.facts, self.loader.tensors)
        else:
            loader.load_progress(self.progress, self.loader.tensors, ranks.world_size)
        if self.random:
            set_random_states(self.random)


class SupervisedTrainer(ABC, Generic[Micro]):
    """Trains a model, which a booster has prepared, on the batches of a dataloader.

    An optimizer step is taken from `accumulation_steps` batches of each rank; an epoch's last one from those that are
    left. Losses are means over everything that such a minibatch of all ranks holds. A trainer is for one `fit`.
    """

    name: str
    """Of the run in the log directory."""

    def __init__(
        self,
        model: nn.Module,
        booster: Booster,
        optimizer: Any,
        lr_scheduler: Any,
        *,
        max_epochs: int,
        accumulation_steps: int,
        start_epoch: int,
        save_interval: int | None,
        save_dir: str | Path | None,
    ) -> None:
        if accumulation_steps < 1 or max_epochs < 0 or start_epoch < 0 or (save_interval or 0) < 0:
            raise ConfigError(
                "expected accumulation_steps of at least 1 and no negative number, got accumulation_steps "
                f"{accumulation_steps}, max_epochs {max_epochs}, start_epoch {start_epoch}, "
                f"save_interval {save_interval}"
            )
        if save_interval and save_dir is None:
            raise ConfigError(f"save_interval is {save_interval}, but there is no save_dir to write checkpoints to")
        self.trained = Trained(model, optimizer, lr_scheduler, booster)
        self.ranks: Ranks = getattr(booster, "ranks", None) or current_ranks()
        self.device = device_of(model)
        self.autocast_dtype: torch.dtype = getattr(booster, "autocast_dtype", torch.float32)
        self.vocabulary = vocabulary_size(model)
        self.max_epochs = max_epochs
        self.accumulation_steps = accumulation_steps
        self.start_epoch = start_epoch
        self.save_interval = save_interval
        self.save_dir = None if save_dir is None else Path(save_dir)
        self._checkpoints = SaveDir(self.save_dir, self.ranks)
        self.step = 0
        """Optimizer steps taken, those before a resumed checkpoint included."""
        self.history: list[Metrics] = []
        """Metrics of each step of this process."""
        self._tracker = Tracker()
        self._resumed: Position | None = None

    def fit(
        self,
        train_dataloader: Iterable[Batch],
        eval_dataloader: Iterable[Batch] | None = None,
        log_dir: str | Path | None = None,
        use_wandb: bool = False,
    ) -> None:
        """Go through the training data `max_epochs` times, and measure on the evaluation data after each.

        With a `save_dir`, a checkpoint is written before each measurement, so that none can cost what was learnt.

        Args:
            train_dataloader: mappings of tensors; on several ranks each has its own, with equally many batches.
            eval_dataloader: measured, never learnt from; more than once, so no generator.
            log_dir: of TensorBoard's files and JSON lines, which rank 0 writes.
            use_wandb: log to Weights & Biases or trackio too.

        Raises:
            ConfigError: before anything is learnt, if nothing can be written to `save_dir` or `log_dir`, or `save_dir`
                has checkpoints of another run.
            DataError: if there is no batch, or one is not what it should be.
            TrainingError: if a loss or gradient is not finite; the minibatch is kept under `save_dir`.
        """
        self._checkpoints.prepare()
        self._tracker = open_log(log_dir, self.name, use_wandb, self.ranks)
        try:
            loader = PassLoader(train_dataloader, what="train_dataloader")
            if eval_dataloader is not None:
                self._before_fit(eval_dataloader)
            if self._resumed is not None:
                self._resumed.resume(loader, self.ranks)
            for epoch in range(self.start_epoch, self.max_epochs):
                self._train(epoch, loader)
                if eval_dataloader is not None:
                    self._save(epoch, loader)
                    self._evaluate(epoch, eval_dataloader)
            if self.step:
                self._save(max(self.max_epochs - 1, self.start_epoch), loader)
        finally:
            self.trained.model.eval()
            self._tracker.close()

    def load_checkpoint(self, directory: str | Path) -> None:
        """Let `fit` go on from a checkpoint, given the same data: to the bit, with as many ranks as wrote it.

        Args:
            directory: the `save_dir` of an earlier run, whose latest whole checkpoint is taken, or one checkpoint's.

        Raises:
            ModelError: if there is no whole one, or it belongs to a model or an optimizer of another form; nothing was
                changed.
        """
        self._resumed = read_supervised(Path(directory), self.trained, self.ranks, self._checkpoints)
        self.start_epoch, self.step = self._resumed.epoch, self._resumed.step

    def _train(self, epoch: int, loader: PassLoader) -> None:
        batches = loader.rest_of_pass(epoch)
        self.trained.model.train()
        while micros := self._window(batches):
            metrics = {"epoch": float(epoch)} | self._learn(micros, epoch)
            self.step += 1
            self.history.append({"step": float(self.step)} | metrics)
            self._tracker.log({f"train/{name}": value for name, value in metrics.items()}, self.step)
            if self.save_interval and self.step % self.save_interval == 0:
                self._save(epoch, loader)
        if not self.step:
            raise DataError("train_dataloader holds no batch; give at least one")

    def _learn(self, micros: list[Micro], epoch: int) -> Metrics:
        try:
            return supervised_step(self.trained, self._objective(), micros, ranks=self.ranks)
        except TrainingError as error:
            if self.save_dir is None:
                raise
            name = f"failed-batch-epoch-{epoch}_step-{self.step + 1}_rank-{self.ranks.everyone.rank}.safetensors"
            raise with_place(
                error, lambda file: self._keep(micros, file), self.save_dir / name, what="minibatch"
            ) from error

    def _keep(self, micros: list[Micro], file: Path) -> None:
        """Write a minibatch for inspection."""
        file.parent.mkdir(parents=True, exist_ok=True)
        named = (micro._asdict() for micro in micros)  # type: ignore[attr-defined]
        tensors = {
            f"{number}.{name}": value.contiguous()
            for number, fields in enumerate(named)
            for name, value in fields.items()
            if isinstance(value, Tensor)
        }
        save_file(tensors, file)

    def _window(self, batches: Iterator[Batch]) -> list[Micro]:
        """Return the micro-batches of the next step; none at the epoch's end, which all ranks reach together."""

        def read() -> list[Micro]:
            return [self._read(batch, training=True) for batch in islice(batches, self.accumulation_steps)]

        micros = together(self.ranks, read, what="read its batches")
        present = int(self.ranks.sum(torch.tensor(int(bool(micros)))))
        if present not in {0, self.ranks.world_size}:
            raise DataError(
                f"train_dataloader ended on {self.ranks.world_size - present} of {self.ranks.world_size} ranks before "
                "the others; give every rank as many batches, as a DistributedSampler does"
            )
        return micros

    def _evaluate(self, epoch: int, loader: Iterable[Batch]) -> None:
        kept = random_states()  # a DataLoader draws from them even without shuffling

        def score() -> tuple[Tensor, ...]:
            micros = (self._read(batch, training=False) for batch in loader)
            return self._score(rounds(self.trained.booster, micros, self.ranks, what=measuring))

        measuring = "measure its evaluation data"
        scores = together(self.ranks, score, what=measuring)
        set_random_states(kept)
        measured = self._figures(scores, epoch)
        self._tracker.log({f"eval/{name}": value for name, value in measured.items()}, self.step)
        if self.ranks.is_first:
            figures = ", ".join(f"{name} {value:.4g}" for name, value in measured.items())
            logger.info("epoch %d: %s", epoch, figures)

    def _save(self, epoch: int, loader: PassLoader) -> None:
        position = Position(epoch, self.step, loader.samples_given, loader.state(), random_states())
        write_supervised(self._checkpoints, self.trained, position, self.ranks)

    def _before_fit(self, loader: Iterable[Batch]) -> None:
        """Look at the evaluation data before anything is learnt; called by all ranks."""
        if is_one_shot(loader):
            raise DataError(
                "eval_dataloader is an iterator, which can be gone through once only, but it is measured after each "
                "epoch; give a list or a DataLoader"
            )
        kept = random_states()
        found = together(self.ranks, lambda: self._look_at(loader), what="read its evaluation data")
        set_random_states(kept)
        if not self.ranks.any(found):
            raise DataError("eval_dataloader holds no batch; give at least one, or none of it")

    def _look_at(self, loader: Iterable[Batch]) -> bool:
        """Read as much of the evaluation data as must be known, and return whether there are any."""
        return any(self._read(batch, training=False) for batch in islice(iter(loader), 1))

    @abstractmethod
    def _objective(self) -> Objective[Micro]:
        """Return what is learnt."""

    @abstractmethod
    def _read(self, batch: Batch, *, training: bool) -> Micro:
        """Return a dataloader's batch as a micro-batch; a DataError says what is wrong with it."""

    @abstractmethod
    def _score(self, micros: Iterable[Micro | None]) -> tuple[Tensor, ...]:
        """Return what this rank's evaluation data say; None stands for an idle pass, where passes wait for others."""

    @abstractmethod
    def _figures(self, scores: tuple[Tensor, ...], epoch: int) -> Metrics:
        """Return what all ranks' evaluation data say together."""


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
        if not ranks.speaks:
            return
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
    progress = None
    if stored != ranks.world_size:
        progress = progress_of_all([_facts(found, each)["loader"] for each in range(stored)])
    form = facts.get("form")
    own_form = training_form(trained.optimizer, trained.scheduler)
    check_training_form(form if isinstance(form, Mapping) else {}, own_form, where=files)
    trained.booster.load_model(trained.model, str(files / "modeling"))
    trained.booster.load_optimizer(trained.optimizer, str(files / "optimizer"))
    trained.booster.load_lr_scheduler(trained.scheduler, str(files / "lr_scheduler"))
    save_dir.goes_on_from(found)
    if progress is not None and ranks.is_first:
        logger.warning(
            "the checkpoint %s is of %d ranks, and %d go on: loaders behind the %d samples that all ranks had used",
            found.name, stored, ranks.world_size, progress.samples,
        )  # fmt: skip
    loader = LoaderState(facts["loader"], under(_LOADER, tensors))
    random = {} if is_fresh else under(_RANDOM, tensors)
    return Position(states["epoch"], states["step"], states["sample_start_index"], loader, random, progress)


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

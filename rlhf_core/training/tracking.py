"""Where a run's numbers and texts go: TensorBoard and JSON lines, and a hosted tracker if one is asked for."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter

from rlhf_core.errors import ConfigError
from rlhf_core.strategy.ranks import Ranks, together
from rlhf_core.training.run_directory import check_writable

logger = logging.getLogger(__name__)

HOSTED = ("wandb", "trackio")  # trackio has the first one's functions, and keeps everything on this machine


class Sink(Protocol):
    """One place that metrics go to."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take in the numbers of one step."""

    def text(self, name: str, text: str, step: int) -> None:
        """Take in a text."""

    def close(self) -> None:
        """Write what is still held back."""


class Tracker:
    """Several sinks as one; with none, everything is dropped. One that fails is dropped, with a warning.

    Args:
        sinks: are told everything, in their order.
        directory: of this run's files; None without a log directory.
    """

    def __init__(self, sinks: tuple[Sink, ...] = (), directory: Path | None = None) -> None:
        self._sinks = sinks
        self.directory = directory

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take in the numbers of one step."""
        self._tell(lambda sink: sink.log(metrics, step))

    def text(self, name: str, text: str, step: int) -> None:
        """Take in a text, such as a sampled response."""
        self._tell(lambda sink: sink.text(name, text, step))

    def close(self) -> None:
        """Write what is still held back; nothing may be logged afterwards."""
        self._tell(lambda sink: sink.close())
        self._sinks = ()

    def _tell(self, tell: Callable[[Sink], None]) -> None:
        for sink in self._sinks:
            try:
                tell(sink)
            except Exception as error:  # of a disk, a network, a hosted service: training is worth more than its curves
                name = type(sink).__name__
                logger.warning("%s failed, and training goes on without it: %s: %s", name, type(error).__name__, error)
                self._sinks = tuple(each for each in self._sinks if each is not sink)


class JsonLines:
    """Appends `{"step", <name>: number}` to metrics.jsonl and `{"step", "name", "text"}` to texts.jsonl."""

    def __init__(self, directory: Path) -> None:
        self._metrics = (directory / "metrics.jsonl").open("a", encoding="utf-8")
        self._texts = (directory / "texts.jsonl").open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one line; what is not a finite number becomes null, for which JSON has a word."""
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        print(json.dumps({"step": step, **numbers}), file=self._metrics, flush=True)

    def text(self, name: str, text: str, step: int) -> None:
        """Write one line."""
        print(json.dumps({"step": step, "name": name, "text": text}), file=self._texts, flush=True)

    def close(self) -> None:
        """Close both files."""
        self._metrics.close()
        self._texts.close()


class TensorBoard:
    """Scalars and texts as TensorBoard reads them."""

    def __init__(self, directory: Path) -> None:
        self._writer = SummaryWriter(str(directory))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write each number as a scalar."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def text(self, name: str, text: str, step: int) -> None:
        """Write the text as it is: indented, as TensorBoard reads Markdown otherwise."""
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        self._writer.add_text(name, indented, step)

    def close(self) -> None:
        """Write what is still held back."""
        self._writer.close()


class Hosted:
    """Weights & Biases, or trackio, which has the same functions."""

    def __init__(self, module: Any, project: str, run_name: str, directory: Path) -> None:
        self._run = module
        options = {"dir": str(directory)} if module.__name__ == "wandb" else {}
        module.init(project=project, name=run_name, **options)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the numbers."""
        self._run.log(dict(metrics), step=step)

    def text(self, name: str, text: str, step: int) -> None:
        """Send nothing: both want tables, and the text is in the JSON lines."""

    def close(self) -> None:
        """End the run."""
        self._run.finish()


class MeanMeter:
    """Running means by name, of whatever was added since the last reset."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, metrics: Mapping[str, float], count: int = 1) -> None:
        """Take in means over `count` things; what is not a number is left out, and does not spoil the mean."""
        for name, value in metrics.items():
            if math.isfinite(value):
                self._sums[name] = self._sums.get(name, 0.0) + value * count
                self._counts[name] = self._counts.get(name, 0) + count

    def means(self) -> dict[str, float]:
        """Return the mean of everything added under each name."""
        return {name: total / self._counts[name] for name, total in self._sums.items()}

    def reset(self) -> None:
        """Forget everything."""
        self._sums.clear()
        self._counts.clear()

    def state(self) -> dict[str, list[float]]:
        """Return sum and count by name, as JSON holds them."""
        return {name: [total, self._counts[name]] for name, total in self._sums.items()}

    def load_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Go on from what `state` returned."""
        self._sums = {name: total for name, (total, _) in state.items()}
        self._counts = {name: int(count) for name, (_, count) in state.items()}


def check_tracking(log_dir: str | Path | None, *, use_wandb: bool) -> None:
    """Check that metrics can go where they are asked to go.

    Raises:
        ConfigError: if a hosted tracker is asked for and none is installed, or there is no log directory.
    """
    if use_wandb and log_dir is None:
        raise ConfigError("use_wandb=True needs a log_dir for its files; give one")
    if use_wandb and _hosted_module() is None:
        raise ConfigError(
            "use_wandb=True asks for Weights & Biases or trackio, but neither is installed; install wandb or trackio, "
            "or go without, as TensorBoard and JSON lines are written anyway"
        )


def open_tracker(log_dir: str | Path | None, name: str, use_wandb: bool = False) -> Tracker:
    """Return the tracker of one run, in a new directory `log_dir/<name>/<time>`.

    Args:
        log_dir: where TensorBoard's files and the JSON lines go; None tracks nothing.
        name: of the kind of run: `ppo`, `sft`.
        use_wandb: log to Weights & Biases too, or to trackio where only that is installed.

    Raises:
        ConfigError: as `check_tracking`, or if the directory cannot be made.
    """
    check_tracking(log_dir, use_wandb=use_wandb)
    if log_dir is None:
        return Tracker()
    check_writable(Path(log_dir) / name, what="log_dir")
    directory = _new_directory(Path(log_dir) / name)
    sinks: list[Sink] = [TensorBoard(directory), JsonLines(directory)]
    if use_wandb:
        sinks.append(Hosted(import_module(_hosted_module() or ""), f"Coati-{name}", directory.name, directory))
    return Tracker(tuple(sinks), directory)


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
        directory = Path(log_dir)
        together(ranks, lambda: check_writable(directory, what="log_dir"), what="write in log_dir")

    def begin() -> Tracker:
        return open_tracker(log_dir, name, use_wandb) if ranks.is_first else Tracker()

    return together(ranks, begin, what="open its log")


def _hosted_module() -> str | None:
    return next((name for name in HOSTED if importlib.util.find_spec(name) is not None), None)


def _new_directory(parent: Path) -> Path:
    """Make a directory named by the time, with a number behind it if another run began in the same second."""
    stamp = datetime.now().astimezone().strftime("%Y-%m-%d_%H-%M-%S")
    number = 0
    while True:
        directory = parent / (f"{stamp}-{number}" if number else stamp)
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return directory

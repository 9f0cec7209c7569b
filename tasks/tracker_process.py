"""The process that writes to one tracker: a line on its input says what runs are to hold, and it adds what they lack.

A tracker's package takes seconds to import, waits for servers as long as it likes, and starts processes of its own.
Here none of that reaches a flow. What a tracker holds is asked of the tracker, so this process may be killed anywhere;
it ends when its input does. It knows neither Prefect nor torch.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_UN, flock
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, NoReturn, Protocol

CLOSE = "close"
"""The line after which what is open is closed, and the process ends by itself."""
WRITTEN = "written"
"""The answer to a line; any other is a sentence of what went wrong, and the process ends after it."""
NAMED = "rlhf.run"
"""The tag by which a run is found again where the tracker names runs itself."""
_NONE = -1
"""Before the first step."""


class Row(NamedTuple):
    """The figures of one step."""

    step: int
    seconds: float
    """That the run has taken until then."""
    figures: dict[str, float]


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker's run is to hold."""

    project: str
    name: str
    """Of letters, digits, dots, dashes and underscores; the same whenever this run is written, and of no other."""
    rows: tuple[Row, ...]
    """In the order of their steps."""
    parameters: dict[str, str]
    tags: dict[str, str]
    is_over: bool
    """Whether no step will be added."""

    @property
    def facts(self) -> dict[str, str]:
        """Parameters and tags, for trackers that know only the former."""
        return self.parameters | {f"rlhf.{name}": value for name, value in self.tags.items()}


class OpenRun(Protocol):
    """A run of a tracker, new or found again."""

    def last_step(self, figure: str) -> int:
        """Return the last step of a figure that the tracker holds, or -1; rows come in the order of their steps."""

    def log(self, row: Row) -> None:
        """Add figures of one step."""

    def finish_rows(self, run: TrackedRun) -> None:
        """Write what is still held back, and what is told of the run as a whole."""

    def close(self) -> None:
        """Leave the run."""


def add_missing(opened: OpenRun, run: TrackedRun) -> None:
    """Add the figures that a tracker lacks; one that it holds of a step is not written again."""
    for row in run.rows:
        lacking = {name: value for name, value in row.figures.items() if row.step > opened.last_step(name)}
        if lacking:
            opened.log(row._replace(figures=lacking))
    opened.finish_rows(run)


class MLflow:
    """A run of an MLflow server, database or directory (MLFLOW_TRACKING_URI)."""

    _MOST = 1000
    """Figures that MLflow takes at once."""
    _MOST_PARAMETERS = 100

    def __init__(self, run: TrackedRun) -> None:
        from mlflow.tracking import MlflowClient

        _, _, database = os.environ["MLFLOW_TRACKING_URI"].partition("sqlite:///")
        if database and not Path(database).exists():
            self._make(Path(database))
        self._client = MlflowClient()
        experiment = self._client.get_experiment_by_name(run.project)
        if experiment is None:
            # MLflow's own choice is a directory below the one that it is called in
            artifacts = str(Path(database).with_name("mlflow-artifacts")) if database else None
            number = self._client.create_experiment(run.project, artifact_location=artifacts)
        else:
            number = experiment.experiment_id
        wanted = f"tags.`{NAMED}` = '{run.name}'"
        found = self._client.search_runs([number], wanted, max_results=1, order_by=["attributes.start_time ASC"])
        # its name comes with its creation, so a kill in between leaves no run that is not found
        self._run = found[0] if found else self._client.create_run(number, run_name=run.name, tags={NAMED: run.name})
        self._last: dict[str, int] = {}
        self._waiting: list[Any] = []

    @staticmethod
    def _make(database: Path) -> None:
        """Make a database beside its place: MLflow cannot go on with one whose tables were made in part."""
        from mlflow.tracking import MlflowClient

        draft = database.with_name(f"{database.name}.draft")
        draft.unlink(missing_ok=True)
        MlflowClient(f"sqlite:///{draft}").search_experiments()
        draft.replace(database)

    def last_step(self, figure: str) -> int:
        """Return the last step of a figure."""
        if figure not in self._last:
            held = self._client.get_metric_history(self._id, figure) if figure in self._run.data.metrics else []
            self._last[figure] = max((each.step for each in held), default=_NONE)
        return self._last[figure]

    def log(self, row: Row) -> None:
        """Add figures of one step, at a time that is the same whenever they are written."""
        from mlflow.entities import Metric

        if len(self._waiting) + len(row.figures) > self._MOST:
            self._write()
        # a database holds a figure with the same time, step and value once, should two writers meet
        at = self._run.info.start_time + round(1000 * row.seconds)
        self._waiting += [Metric(name, value, at, row.step) for name, value in row.figures.items()]
        self._last |= dict.fromkeys(row.figures, row.step)

    def finish_rows(self, run: TrackedRun) -> None:
        """Write what waits, parameters that are not there yet, tags, and whether the run is over."""
        from mlflow.entities import Param, RunTag

        self._write()
        data = self._run.data
        lacking = [Param(name, value) for name, value in run.parameters.items() if name not in data.params]
        tags = [RunTag(name, value) for name, value in run.tags.items() if data.tags.get(name) != value]
        for first in range(0, max(len(lacking), len(tags)), self._MOST_PARAMETERS):
            part = slice(first, first + self._MOST_PARAMETERS)
            self._client.log_batch(self._id, params=lacking[part], tags=tags[part])
        status = "FINISHED" if run.is_over else "RUNNING"
        if self._run.info.status != status:
            (self._client.set_terminated if run.is_over else self._client.update_run)(self._id, status)
        self._run = self._client.get_run(self._id)

    def close(self) -> None:
        """Do nothing: each request stands alone."""

    @property
    def _id(self) -> str:
        return str(self._run.info.run_id)

    def _write(self) -> None:
        for first in range(0, len(self._waiting), self._MOST):
            self._client.log_batch(self._id, metrics=self._waiting[first : first + self._MOST])
        self._waiting = []


class TensorBoard:
    """Event files in a directory of the run's own, with `run.json` beside them."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._directory = Path(os.environ["RLHF_TENSORBOARD"]) / run.project / run.name
        self._directory.mkdir(parents=True, exist_ok=True)
        held = EventAccumulator(str(self._directory), size_guidance={"scalars": 0}).Reload()
        self._last = {name: max(each.step for each in held.Scalars(name)) for name in held.Tags()["scalars"]}
        self._writer = EventFileWriter(str(self._directory))

    def last_step(self, figure: str) -> int:
        """Return the last step of a figure."""
        return int(self._last.get(figure, _NONE))

    def log(self, row: Row) -> None:
        """Add figures of one step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.figures.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=row.step, summary=Summary(value=values)))
        self._last |= dict.fromkeys(row.figures, row.step)

    def finish_rows(self, run: TrackedRun) -> None:
        """Write the events out, and parameters and tags."""
        self._writer.flush()
        draft = self._directory / "draft.json"
        draft.write_text(json.dumps({"parameters": run.parameters, "tags": run.tags}, indent=1))
        draft.replace(self._directory / "run.json")

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class _InOrder:
    """What is common to trackers that take steps in one order: one number says what they hold."""

    def __init__(self, last: int) -> None:
        self._last = last

    def last_step(self, figure: str) -> int:
        """Return the last step, which is that of all figures."""
        del figure
        return self._last


class Trackio(_InOrder):
    """A run of trackio: a database on this machine (TRACKIO_DIR), or a Space or server of the user's."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._module = trackio
        self._run = trackio.init(
            run.project, run.name, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False, config=run.facts
        )
        super().__init__(self._run._next_step - 1)  # it has no public word for it

    def log(self, row: Row) -> None:
        """Add figures of one step."""
        self._run.log(row.figures, step=row.step)
        self._last = row.step

    def finish_rows(self, run: TrackedRun) -> None:
        """Do nothing: a thread of trackio's writes, and `close` waits for it."""

    def close(self) -> None:
        """End the run."""
        self._module.finish()


class WeightsAndBiases(_InOrder):
    """A run of Weights & Biases; offline, one directory for each process that wrote it, for `wandb sync`."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=run.project,
            id=run.name,
            name=run.name,
            resume="allow",
            config=run.facts,
            settings=wandb.Settings(x_disable_stats=True, x_disable_meta=True, disable_git=True, save_code=False),
        )
        own = Path(self._run.settings.sync_dir)
        others = [file for file in own.parent.glob(f"*-{run.name}/run-{run.name}.wandb") if file.parent != own]
        records = [record for file in others for record in wandb_records(file)] if self._run.offline else []
        steps = [int(record.history.step.num) for record in records if record.HasField("history")]
        super().__init__(max([self._run.step - 1, *steps]))

    def log(self, row: Row) -> None:
        """Add figures of one step."""
        self._run.log(row.figures, step=row.step, commit=True)
        self._last = row.step

    def finish_rows(self, run: TrackedRun) -> None:
        """Tell what is new of the run as a whole."""
        self._run.config.update(run.facts, allow_val_change=True)

    def close(self) -> None:
        """End the run, which writes or sends all of it."""
        self._run.finish()


_BLOCK, _HEADER, _BEGIN = 32768, struct.Struct("<IHB"), 7
_FULL, _FIRST, _LAST = 1, 2, 4


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of an offline run's file; the end of one whose process was killed may be cut off.

    It is LevelDB's log (blocks with pieces of records) after seven bytes of its own; the package has no reader of it.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), _BEGIN, b""
    while at + _HEADER.size <= len(data):
        room = _BLOCK - at % _BLOCK
        _, length, kind = _HEADER.unpack_from(data, at) if room >= _HEADER.size else (0, 0, 0)
        if not kind:  # the rest of a block that has no room for a piece
            at += room
            continue
        piece = data[at + _HEADER.size :][:length]
        at += _HEADER.size + length
        if len(piece) < length:
            return
        whole = piece if kind in {_FULL, _FIRST} else whole + piece
        if kind in {_FULL, _LAST}:
            yield Record.FromString(whole)


TRACKERS: dict[str, type[Any]] = {
    "mlflow": MLflow,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WeightsAndBiases,
}


def as_line(runs: list[TrackedRun]) -> str:
    """Return runs as the process reads them."""
    return json.dumps([vars(run) for run in runs]) + "\n"


def _from_line(line: str) -> list[TrackedRun]:
    return [TrackedRun(**{**each, "rows": tuple(Row(*row) for row in each["rows"])}) for each in json.loads(line)]


class _Tracker:
    """One tracker, with the run that is open in it: some take one at a time."""

    def __init__(self, name: str) -> None:
        self._open_run: type[Any] = TRACKERS[name]
        self._name = ""
        self._opened: OpenRun | None = None

    def write(self, runs: list[TrackedRun]) -> None:
        for run in runs:
            if self._opened is None or run.name != self._name:
                self.close()
                self._opened, self._name = self._open_run(run), run.name
            add_missing(self._opened, run)
            if run.is_over:
                self.close()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
        self._name, self._opened = "", None


def _read(lines: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    _end()


def _end() -> NoReturn:
    """End this process at once, with what a package has started."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def main(name: str, lock: Path) -> None:
    """Write to a tracker, line by line, until told to close, or until the input ends.

    Args:
        name: of the tracker.
        lock: file that a writer holds while it writes: one of a flow that was killed may not have ended yet.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # packages print what they like
    lines: SimpleQueue[str] = SimpleQueue()
    Thread(target=_read, args=(lines,), daemon=True).start()
    tracker, line = _Tracker(name), ""
    with lock.open("a") as held:
        while line != CLOSE:
            line = lines.get().strip()
            flock(held, LOCK_EX)
            try:
                if line == CLOSE:
                    tracker.close()
                else:
                    tracker.write(_from_line(line))
            except Exception as error:  # of a disk, a network, a package: told to the flow, which goes on without
                first = (str(error).strip().splitlines() or [""])[0]
                answers.write(f"{type(error).__name__}: {first}\n")
                _end()
            flock(held, LOCK_UN)
            answers.write(f"{WRITTEN}\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

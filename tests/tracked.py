"""What trackers of this machine hold, read with their own readers: by run and figure, each step with its value."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from infra import trackers
from infra.settings import settings

Held = dict[str, dict[str, list[tuple[int, float]]]]


def held(name: str, project: str) -> Held:
    """Return all that a tracker in the home of the settings holds of a project; what stands twice is there twice."""
    read = {"mlflow": _mlflow, "tensorboard": _tensorboard, "trackio": _trackio, "wandb": _wandb}[name]
    found: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for run, figure, step, value in read(trackers.directory_of(settings()), project):
        found[run][figure].append((step, value))
    return {run: dict(figures) for run, figures in found.items()}


def _mlflow(directory: Path, project: str) -> list[tuple[str, str, int, float]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{directory}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name(project).experiment_id])
    names = [each.info.run_name for each in runs]
    assert len(set(names)) == len(names), "a run stands twice"
    return [
        (run.info.run_name, figure, each.step, each.value)
        for run in runs
        for figure in run.data.metrics
        for each in client.get_metric_history(run.info.run_id, figure)
    ]


def _tensorboard(directory: Path, project: str) -> list[tuple[str, str, int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs = {each.name: EventAccumulator(str(each)).Reload() for each in (directory / "tensorboard" / project).iterdir()}
    return [
        (name, figure, event.step, event.value)
        for name, run in runs.items()
        for figure in run.Tags()["scalars"]
        # files of two processes that began in the same second are read in the order of their ids as text
        for event in sorted(run.Scalars(figure), key=lambda event: event.step)
    ]


def _trackio(directory: Path, project: str) -> list[tuple[str, str, int, float]]:
    import sqlite3

    (file,) = (directory / "trackio").glob(f"{project}*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT run_name, step, metrics, run_id FROM metrics ORDER BY step").fetchall()
    ids: dict[str, set[Any]] = defaultdict(set)
    for run, _, _, number in rows:
        ids[run].add(number)
    assert all(len(each) == 1 for each in ids.values()), "a run stands twice"
    return [(run, figure, step, value) for run, step, told, _ in rows for figure, value in json.loads(told).items()]


def _wandb(directory: Path, project: str) -> list[tuple[str, str, int, float]]:
    """Return the steps of all directories of offline runs, as `wandb sync` would send them to the run of their id."""
    from tasks.tracker_process import wandb_records

    found = []
    for file in sorted((directory / "wandb").glob("*/*.wandb")):
        name = file.name.removeprefix("run-").removesuffix(".wandb")
        for record in wandb_records(file):
            if record.HasField("run"):
                assert record.run.project == project
            for item in record.history.item if record.HasField("history") else ():
                figure = item.key or "/".join(item.nested_key)
                if not figure.startswith("_"):
                    found.append((name, figure, int(record.history.step.num), float(json.loads(item.value_json))))
    return found
